"""Targets: what a build is for. Plain data; ask a target for a feature, do not compare numbers."""

import difflib
import enum
from dataclasses import dataclass

from dsv4c.errors import PlanError, RecipeError


class Feature(enum.Enum):
    """What the chip can do; the value is how an error message says it."""

    CUDA = "CUDA kernels"
    FP8_MMA = "FP8 tensor-core operands"
    TMA = "the tensor memory accelerator"
    WGMMA = "warp-group matrix instructions"


@dataclass(frozen=True)
class Target:
    """A class of machines. `arch` goes to the kernel compilers and into the engine header unchanged."""

    name: str
    arch: str
    sm_counts: tuple[int, ...]  # products of this arch that have a table; empty where there are no SMs
    smem_per_block: int  # bytes, 0 where there is no shared memory
    memory_bytes: int  # of the smallest product; 0: the host's, known only when the engine runs
    features: frozenset[Feature]

    def require(self, feature: Feature, what: str) -> None:
        """Refuses `what` on a target without `feature`."""
        if feature not in self.features:
            raise PlanError(
                f"{what} needs {feature.value}, which target {self.name!r} ({self.arch}) does not have",
                hint="choose another target, or a recipe that does not ask for it",
            )


TARGETS: dict[str, Target] = {
    "cpu": Target(name="cpu", arch="cpu", sm_counts=(), smem_per_block=0, memory_bytes=0, features=frozenset()),
    # H100 SXM and H200 have 132 SMs, H100 PCIe has 114. A block can have 227 KiB of the 228 KiB of an SM.
    "h100": Target(
        name="h100",
        arch="sm_90a",
        sm_counts=(132, 114),
        smem_per_block=227 << 10,
        memory_bytes=80_000_000_000,
        features=frozenset({Feature.CUDA, Feature.FP8_MMA, Feature.TMA, Feature.WGMMA}),
    ),
}
# What people call a machine whose engines have another name.
_PRODUCTS = {"h200": "h100", "hopper": "h100", "gpu": "h100", "cuda": "h100"}
# Announced, so that an error can say "not yet" rather than "unknown".
COMING_TARGETS = ("orin",)


def find_target(name: str) -> Target:
    """The target called `name`."""
    if name in TARGETS:
        return TARGETS[name]
    available = ", ".join(TARGETS)
    if name in COMING_TARGETS:
        raise RecipeError(f"target {name!r} cannot be built yet", hint=f"this version builds for: {available}")
    if built := _PRODUCTS.get(name.lower()):
        raise RecipeError(
            f"unknown target {name!r}", hint=f"`--target {built}` builds for H100 and H200; plans know both by name"
        )
    nearest = difflib.get_close_matches(name.lower(), TARGETS, n=1)
    meant = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise RecipeError(
        f"unknown target {name!r}",
        hint=f"{meant}this version builds for: {available}; coming: {', '.join(COMING_TARGETS)}",
    )
