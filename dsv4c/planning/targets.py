"""What `dsv4c plan` knows of targets: memory, bandwidth and arithmetic of the machines, as plain data.

A target here need not be one that can be built: `dsv4c.target` has those.
"""

import difflib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4c.errors import RecipeError
from dsv4c.recipe import Recipe, load_recipe, recipes_folder
from dsv4c.target import TARGETS, Target

GB = 1e9
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class PlanTarget:
    """One device. Zero or None: not known before it is measured.

    `memory_bytes` and `bandwidth` (bytes a second) are the vendor's decimal figures; `measured_bandwidth` is what a
    read of weights reached. `flops` is the dense bf16 (Orin: fp16) tensor rate. `reserved_bytes` is what driver,
    context and, where memory is shared with it, the system keep. `l2_bytes` is what the driver reports of the cache.
    """

    name: str
    product: str
    arch: str
    memory_bytes: int
    reserved_bytes: int
    bandwidth: float | None
    measured_bandwidth: float | None
    flops: float | None
    sm_count: int
    can_build: bool
    l2_bytes: int | None = None

    @property
    def usable_bytes(self) -> int:
        return max(self.memory_bytes - self.reserved_bytes, 0)

    @property
    def best_bandwidth(self) -> float | None:
        """The measured bandwidth where there is one, else the nominal one."""
        return self.measured_bandwidth or self.bandwidth


# H100 SXM5, H200 SXM and Jetson AGX Orin 64 GB: NVIDIA's data sheets. The H200 was measured by reading its memory.
PLAN_TARGETS: dict[str, PlanTarget] = {
    "cpu": PlanTarget("cpu", "this machine", "cpu", 0, 0, None, None, None, 0, True),
    "h100": PlanTarget(
        "h100", "H100 SXM 80 GB", "sm_90a", 80_000_000_000, 500_000_000, 3350 * GB, None, 989.5e12, 132, True, 50 << 20
    ),
    "h200": PlanTarget(
        "h200",
        "H200 SXM 141 GB",
        "sm_90a",
        141_000_000_000,
        500_000_000,
        4800 * GB,
        4586 * GB,
        989.5e12,
        132,
        True,
        60 << 20,
    ),
    "orin": PlanTarget(
        "orin", "Jetson AGX Orin 64 GB", "sm_87", 64_000_000_000, 3_000_000_000, 204.8 * GB, None, 42.5e12, 16, False
    ),
}

# Other products of a target: memory, bandwidth and SM count differ, the kernels do not. NVIDIA's data sheets; no tensor
# rate where the sheet gives only that of GPU and accelerators together.
_ORIN = PLAN_TARGETS["orin"]
MODULES: dict[str, dict[str, PlanTarget]] = {
    "h100": {
        "sxm": PLAN_TARGETS["h100"],
        "pcie": replace(
            PLAN_TARGETS["h100"], product="H100 PCIe 80 GB", bandwidth=2039 * GB, flops=756e12, sm_count=114
        ),
    },
    "orin": {
        "agx-64": _ORIN,
        "agx-32": replace(_ORIN, product="Jetson AGX Orin 32 GB", memory_bytes=32_000_000_000, flops=None, sm_count=14),
        "nx-16": replace(
            _ORIN,
            product="Jetson Orin NX 16 GB",
            memory_bytes=16_000_000_000,
            bandwidth=102.4 * GB,
            flops=None,
            sm_count=8,
        ),
        "nano-8": replace(
            _ORIN,
            product="Jetson Orin Nano 8 GB",
            memory_bytes=8_000_000_000,
            bandwidth=68 * GB,
            flops=None,
            sm_count=8,
        ),
    },
}


def machine_memory_bytes() -> int:
    """Physical memory of this machine, or the limit of the container where that is lower."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdecimal():
            sizes.append(int(text))
    return min(sizes)


def find_plan_target(
    name: str, memory_gb: float | None = None, bandwidth_gb: float | None = None, module: str | None = None
) -> PlanTarget:
    """The target called `name`, or a module of it, with another memory or bandwidth (decimal GB, GB/s) where given."""
    if name not in PLAN_TARGETS:
        nearest = difflib.get_close_matches(name, PLAN_TARGETS, n=1)
        meant = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise RecipeError(f"unknown target {name!r}", hint=f"{meant}plans are for: {', '.join(PLAN_TARGETS)}")
    target = PLAN_TARGETS[name]
    if module is not None:
        modules = MODULES.get(name, {})
        if module not in modules:
            known = (
                f"modules of {name}: {', '.join(modules)}" if modules else f"{name} has one form; leave --module out"
            )
            raise RecipeError(f"unknown module {module!r} of target {name}", hint=known)
        target = modules[module]
    if memory_gb is not None:
        target = replace(target, memory_bytes=round(memory_gb * GB))
    elif not target.memory_bytes:
        target = replace(target, memory_bytes=machine_memory_bytes())
    if bandwidth_gb is not None:
        target = replace(target, bandwidth=bandwidth_gb * GB, measured_bandwidth=None)
    return target


def plan_recipe(target: PlanTarget, path: Path | None) -> Recipe:
    """The recipe of a plan: the target's own, or the one in `path`, which may be of a target that can be built.

    A product without a target of its own (an H200) is planned as the target whose kernels it runs. Targets that cannot
    be built yet have no recipe file: weights as stored, reference numerics, FP8 KV, FP4 index keys.
    """
    for built in TARGETS.values():
        if built.arch == target.arch:
            return Recipe.for_target(built.name, path)
    as_target = Target(target.name, target.arch, (target.sm_count,), 0, target.memory_bytes, frozenset())
    if path is None:
        return Recipe(target=as_target, numerics="reference", kv="fp8", index_keys="fp4")
    bundled = recipes_folder() / (path.name if path.suffix == ".toml" else f"{path.name}.toml")
    chosen = bundled if not path.exists() and path.parent == Path() and bundled.is_file() else path
    return replace(load_recipe(chosen), target=as_target, experts=None)
