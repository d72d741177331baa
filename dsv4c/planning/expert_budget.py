"""Budgets of the routed experts: what their kernels take of an SM, and their weights against the L2 cache.

Pure functions over numbers; needs no torch, so that `inspect` starts at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4c.errors import RecipeError
from dsv4c.plan.expert_hits import distinct_experts
from dsv4c.planning.tables import size_text
from dsv4c.wording import counted

# Operators that compute routed experts.
EXPERT_OPERATORS = ("moe_ffn", "placed_experts")
# The L2 of Hopper is two halves, each of which may keep its own copy of what SMs of both read.
_COUNTED_SHARE = 2


@dataclass(frozen=True)
class SmLimits:
    """What an SM has. A block of `reserved_bytes` more than its own shared memory is counted against it."""

    registers: int
    shared_bytes: int
    block_shared_bytes: int  # the most that one block can have
    reserved_bytes: int
    threads: int
    blocks: int


# CUDA C++ programming guide, compute capability 9.0.
SM_LIMITS: dict[str, SmLimits] = {"sm_90a": SmLimits(65536, 228 << 10, 227 << 10, 1 << 10, 2048, 32)}


@dataclass(frozen=True)
class BlockBudget:
    """A block of a kernel; `registers` a thread, None before it is compiled."""

    kernel: str
    threads: int
    registers: int | None
    shared_bytes: int

    @property
    def block_registers(self) -> int | None:
        """A warp takes them in units of 8 a thread."""
        return None if self.registers is None else -(-self.threads // 32) * 32 * (-(-self.registers // 8) * 8)

    def blocks_per_sm(self, sm: SmLimits) -> int:
        """How many an SM can hold at once, by all that is known; 0: not one."""
        if self.shared_bytes > sm.block_shared_bytes:
            return 0
        return min(
            sm.shared_bytes // (self.shared_bytes + sm.reserved_bytes),
            sm.threads // (-(-self.threads // 32) * 32),
            sm.registers // self.block_registers if self.block_registers else sm.blocks,
            sm.blocks,
        )

    def most_registers(self, sm: SmLimits) -> int:
        """A thread's, for one block to fit."""
        return min(sm.registers // (-(-self.threads // 32) * 32) // 8 * 8, 255)

    def to_text(self, sm: SmLimits) -> str:
        used = self.block_registers
        taken = (
            f"at most {self.most_registers(sm)} registers each for {sm.registers:,}"
            if used is None
            else f"{self.registers} registers each: {used:,} of {sm.registers:,} ({used / sm.registers:.0%})"
        )
        blocks = self.blocks_per_sm(sm)
        return (
            f"{self.threads} threads, {taken}; shared memory {self.shared_bytes:,} of {sm.block_shared_bytes:,} bytes "
            f"({self.shared_bytes / sm.block_shared_bytes:.0%}); {blocks} {'block' if blocks == 1 else 'blocks'} an SM"
        )


def kernel_budgets(machine_code: Iterable[Mapping[str, Any]]) -> list[BlockBudget]:
    """Of the expert kernels in an engine's manifest, by entry the variant that takes most."""
    found: dict[str, BlockBudget] = {}
    for kernel in machine_code:
        if kernel["operator"] not in EXPERT_OPERATORS:
            continue
        shared = kernel["static_shared_bytes"] + kernel["dynamic_shared_bytes"]
        budget = BlockBudget(kernel["entry"], kernel["block"], kernel["registers"], shared)
        found[budget.kernel] = max(found.get(budget.kernel, budget), budget, key=_size)
    return [found[name] for name in sorted(found)]


def _size(budget: BlockBudget) -> tuple[int, int]:
    return budget.shared_bytes, budget.block_registers or 0


@dataclass(frozen=True)
class RoutedExperts:
    """The routed experts of `count` layers that are alike; `size_bytes` are all of one layer, as in the engine."""

    count: int
    size_bytes: int
    experts: int
    per_token: int

    @property
    def one_bytes(self) -> int:
        return self.size_bytes // self.experts

    def hit_bytes(self, tokens: int) -> float:
        """Of one layer, that a step of `tokens` rows reads when routing is uniform."""
        return self.size_bytes * distinct_experts(self.experts, tokens, self.per_token) / self.experts


def l2_text(size: int) -> str:
    """Caches are built in powers of two, weights are counted in decimal units: both."""
    return f"{size_text(size)} ({size >> 20} MiB)"


def require_l2_resident(layers: Sequence[RoutedExperts], l2_bytes: int | None, product: str) -> str:
    """For `l2_resident = "experts"`: a sentence where the experts do fit the L2, else RecipeError with the numbers.

    Nothing is done for what fits: the cache keeps it or not, as everything else that a step reads.
    """
    if not layers or not l2_bytes:
        why = "the model has no routed experts" if not layers else f"the L2 cache of {product} is not known"
        raise RecipeError(f'`experts.l2_resident` is "experts", but {why}', hint="leave it out of the recipe")
    total = sum(layer.count * layer.size_bytes for layer in layers)
    if total * _COUNTED_SHARE <= l2_bytes:
        return (
            f"the routed experts of all layers ({size_text(total)}) fit the L2 cache of {l2_text(l2_bytes)} by "
            "themselves; `experts.l2_resident` adds nothing"
        )
    largest = max(layers, key=lambda layer: layer.size_bytes)
    count = sum(layer.count for layer in layers)
    raise RecipeError(
        f'`experts.l2_resident` is "experts", but they do not fit the L2 cache of {product}: one expert is '
        f"{size_text(largest.one_bytes)}, the {largest.experts} of a layer {size_text(largest.size_bytes)}, those of "
        f"{counted(count, 'layer')} {size_text(total)}; the cache is {l2_text(l2_bytes)}, and as its halves may each "
        f"keep a copy, {size_text(l2_bytes // _COUNTED_SHARE)} are counted on",
        hint="leave `experts.l2_resident` out: a step reads every expert that it hits once, from memory",
    )
