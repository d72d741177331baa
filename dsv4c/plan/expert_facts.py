"""What an engine's manifest says of its routed experts: how they lie, and which SMs compute them."""

from typing import Any

from dsv4c.plan.cost import tensor_bytes
from dsv4c.plan.execution_plan import ExecutionPlan, Launch, TensorRef
from dsv4c.recipe import Recipe
from dsv4c.step_abi import DType

_FORMATS = {DType.F4E2M1X2: "fp4", DType.F8E4M3: "fp8"}


def expert_facts(plan: ExecutionPlan, recipe: Recipe) -> dict[str, Any] | None:
    """The `experts` of the manifest; None where no launch is `placed_experts`.

    Of a layer, `table` is where in WEIGHTS its i32 rows lie (dsv4c/graph/topology.py), one for each of `sm_counts`;
    striped topologies have none. Of a bucket, `place_pairs` is how many pairs a place has at most, and `halves` says
    whether SMs do the places in two halves.
    """
    launches = [launch for launch in plan.buckets[0].launches if launch.kernel == "placed_experts"]
    if not launches or recipe.experts is None:
        return None
    first = launches[0]
    hidden, stack, inner = _tensor(first, 0).sizes[1], _tensor(first, 5), first.args[7]
    return {
        "layout": "packed",
        "format": _FORMATS[stack.dtype],
        "experts": stack.sizes[0],
        "per_token": first.args[8],
        "hidden": hidden,
        "inner": inner,
        "expert_bytes": tensor_bytes(stack) // stack.sizes[0],
        "topology": recipe.experts.topology,
        "group_sms": recipe.experts.group_sms,
        "trace": recipe.experts.trace.digest if recipe.experts.trace else None,
        "sm_counts": list(recipe.target.sm_counts),
        "layers": [
            {
                "layer": launch.layer,
                "choice": "hash" if launch.args[3] is not None else "score",
                "table": _table(launch),
            }
            for launch in launches
        ],
        "buckets": _buckets(plan),
    }


def _tensor(launch: Launch, index: int) -> TensorRef:
    ref = launch.args[index]
    assert isinstance(ref, TensorRef)
    return ref


def _table(launch: Launch) -> dict[str, int] | None:
    table = launch.args[6]
    return {"offset": table.offset, "row": table.sizes[1]} if isinstance(table, TensorRef) else None


def _buckets(plan: ExecutionPlan) -> list[dict[str, Any]]:
    """By rows: the kernel that multiplies, and the pairs of its places."""
    found: dict[int, dict[str, Any]] = {}
    for bucket in plan.buckets:
        for call in (call for launch in bucket.launches if launch.kernel == "placed_experts" for call in launch.calls):
            constants = dict(call.variant.constants)
            if "TILE" in constants and "INNER" in constants:
                found[bucket.tokens] = {
                    "tokens": bucket.tokens,
                    "kernel": call.variant.entry,
                    "place_pairs": constants["TILE"],
                    "halves": bool(constants.get("HALVES", 0)),
                }
    return [found[tokens] for tokens in sorted(found)]
