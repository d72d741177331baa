"""Kernel calls for every launch of a plan: the selectors of the target, asked for each bucket and SM count."""

from dataclasses import replace

from dsv4c.errors import KernelError
from dsv4c.kernels.registry import SELECTORS, require_kernels
from dsv4c.kernels.select.selection import Selection
from dsv4c.plan.execution_plan import BucketPlan, ExecutionPlan, KernelCall, KernelVariant, Launch
from dsv4c.target import Feature, Target


def assign_kernels(plan: ExecutionPlan, target: Target) -> ExecutionPlan:
    """The plan with calls of compiled kernels; on a target whose kernels are in the runtime, the plan as it is.

    Every bucket occurs once for each SM count of the target, and its arena has grown by the scratch of its operators.
    Raises KernelError where the target lacks a kernel, PlanError where a kernel cannot do what a launch asks.
    """
    require_kernels(plan, target)
    if Feature.CUDA not in target.features:
        return plan
    entries = tuple(
        replace(
            entry,
            buckets=tuple(
                _assigned(bucket, target, sm_count) for sm_count in target.sm_counts for bucket in entry.buckets
            ),
        )
        for entry in plan.entry_points
    )
    return replace(plan, entry_points=entries)


def _assigned(bucket: BucketPlan, target: Target, sm_count: int) -> BucketPlan:
    selection = Selection(target, sm_count, bucket.tokens, bucket.arena_bytes)
    launches, scratch = [], 0
    for launch in bucket.launches:
        selection.scratch_bytes = 0
        calls = tuple(SELECTORS[target.arch][launch.kernel](launch, selection))
        _check(launch, calls)
        launches.append(replace(launch, calls=calls))
        scratch = max(scratch, selection.scratch_bytes)
    arena = selection.scratch_start + scratch if scratch else bucket.arena_bytes
    return replace(bucket, launches=tuple(launches), arena_bytes=arena, sm_count=sm_count)


def _check(launch: Launch, calls: tuple[KernelCall, ...]) -> None:
    """What only a selector's fault could break; threads and memory of a block are checked with the compiled kernel."""
    for call in calls:
        if not 0 < call.block <= 1024 or min(call.grid) < 1 or max(call.grid[1:]) > 65535:
            raise KernelError(
                f"{call.variant.entry} for %{launch.name}: a grid of {call.grid} blocks of {call.block} threads cannot "
                "be launched"
            )
    # The runtime launches operators in order: only a call of the same operator can be known to come right before.
    assert calls and not calls[0].programmatic, launch.name
    assert calls[-1].args[len(calls[-1].args) - len(launch.outputs) :] == launch.outputs, launch.name


def plan_variants(plan: ExecutionPlan) -> list[KernelVariant]:
    """The distinct kernels of a plan, in an order that only they decide."""
    variants = {call.variant for bucket in plan.buckets for launch in bucket.launches for call in launch.calls}
    return sorted(variants, key=repr)
