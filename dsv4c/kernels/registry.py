"""Which operators each target has code for.

On the cpu target the code is in the runtime library (`runtime/src/cpu/registry.cc` is the same list, which a test
compares). On a target that compiles kernels, a selector turns the launch of an operator into calls of them: one module
of `select/` a family of operators, its sources of the same name in `cuda/` and `triton/`.
"""

from collections.abc import Mapping

from dsv4c.errors import KernelError
from dsv4c.kernels.select import attention, compression, experts, matmul, mhc, placed_experts, routing, rows
from dsv4c.kernels.select.selection import Selector
from dsv4c.plan.execution_plan import ExecutionPlan
from dsv4c.target import Target

# By `Target.arch`, then operator.
SELECTORS: Mapping[str, Mapping[str, Selector]] = {
    "sm_90a": {
        **rows.SELECTORS,
        **mhc.SELECTORS,
        **attention.SELECTORS,
        **compression.SELECTORS,
        **matmul.SELECTORS,
        **routing.SELECTORS,
        **experts.SELECTORS,
        **placed_experts.SELECTORS,
    },
}

# By `Target.arch`.
KERNELS: Mapping[str, frozenset[str]] = {
    "cpu": frozenset(
        {
            "add",
            "attention",
            "commit_ring",
            "compress",
            "count_routing",
            "embedding",
            "fp4_round",
            "fp8_round",
            "gather_rows",
            "grouped_linear",
            "hadamard",
            "linear",
            "mhc_combine",
            "mhc_head",
            "mhc_mix",
            "moe_ffn",
            "rms_norm",
            "rope",
            "route_hash",
            "route_topk",
            "sample",
            "select_entries",
            "swiglu",
        }
    ),
    **{arch: frozenset(selectors) for arch, selectors in SELECTORS.items()},
}


def require_kernels(plan: ExecutionPlan, target: Target) -> None:
    """Raise KernelError, naming the operators and the first launch of each, where the target has no code for them."""
    known = KERNELS.get(target.arch, frozenset())
    missing = [name for name in plan.kernels if name not in known]
    if not missing:
        return
    launches = [launch for bucket in plan.buckets for launch in bucket.launches]
    where = [f"{name} (%{next(la.name for la in launches if la.kernel == name)})" for name in missing]
    raise KernelError(
        f"target {target.name} has no kernel for {', '.join(where)}",
        hint="write the kernel and name it in dsv4c/kernels/registry.py, or lower the operator in a pass",
    )
