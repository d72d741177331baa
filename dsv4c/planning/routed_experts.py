"""The routed experts of a plan: how large, how many, and which kernels compute them."""

from collections.abc import Sequence
from typing import Any

from dsv4c.plan.cost import tensor_bytes
from dsv4c.plan.execution_plan import ExecutionPlan, Launch, TensorRef
from dsv4c.plan.expert_hits import distinct_experts
from dsv4c.planning.expert_budget import (
    EXPERT_OPERATORS,
    SM_LIMITS,
    BlockBudget,
    RoutedExperts,
    require_l2_resident,
)
from dsv4c.planning.layers import ModelPlan
from dsv4c.planning.targets import PlanTarget
from dsv4c.recipe import Recipe

_SHOWN_TOKENS = (1, 4, 16, 64)


def expert_stacks(launch: Launch) -> list[TensorRef]:
    """The weights of the routed experts that a launch reads; none where it is another operator."""
    refs = {"moe_ffn": launch.args[3:7], "placed_experts": launch.args[5:6]}.get(launch.kernel, ())
    return [ref for ref in refs if isinstance(ref, TensorRef)]


def routed_experts(launch: Launch, count: int = 1) -> RoutedExperts | None:
    """Those of a launch that occurs `count` times; None where it is another operator."""
    stacks = expert_stacks(launch)
    if not stacks:
        return None
    per_token = launch.args[8] if launch.kernel == "placed_experts" else _columns(launch.args[1])
    assert isinstance(per_token, int)
    return RoutedExperts(count, sum(map(tensor_bytes, stacks)), stacks[0].sizes[0], per_token)


def _columns(ids: object) -> int:
    assert isinstance(ids, TensorRef)
    return ids.sizes[1]


def engine_experts(plan: ExecutionPlan) -> list[RoutedExperts]:
    """Of every layer of a whole plan."""
    found = map(routed_experts, plan.buckets[0].launches)
    return [experts for experts in found if experts is not None]


def model_experts(plan: ModelPlan) -> list[RoutedExperts]:
    """The same of a plan with one layer a kind."""
    found = (routed_experts(launch, plan.count(launch.layer)) for launch in plan.reduced.buckets[0].launches)
    return [experts for experts in found if experts is not None]


def l2_notes(experts: Sequence[RoutedExperts], recipe: Recipe, target: PlanTarget) -> list[str]:
    """What is to be said of `[experts] l2_resident`; raises RecipeError where it asks for what cannot be."""
    wanted = recipe.experts is not None and recipe.experts.l2_resident == "experts"
    return [require_l2_resident(experts, target.l2_bytes, target.product)] if wanted else []


def expert_budgets(plan: ModelPlan, recipe: Recipe, target: PlanTarget) -> dict[str, Any]:
    """Weights of the routed experts against the L2 cache, and what their kernels ask of an SM before they are compiled.

    `one_bytes`, `layer_bytes` and `hits` are of the layer with the largest experts.
    """
    layers = model_experts(plan)
    largest = max(layers, key=lambda layer: layer.size_bytes)
    return {
        "layers": sum(layer.count for layer in layers),
        "experts": largest.experts,
        "one_bytes": largest.one_bytes,
        "layer_bytes": largest.size_bytes,
        "total_bytes": sum(layer.count * layer.size_bytes for layer in layers),
        "hits": [
            {
                "tokens": tokens,
                "experts": distinct_experts(largest.experts, tokens, largest.per_token),
                "size_bytes": round(largest.hit_bytes(tokens)),
            }
            for tokens in _SHOWN_TOKENS
        ],
        "l2_bytes": target.l2_bytes,
        "kernels": _kernels(plan, target),
        "notes": l2_notes(layers, recipe, target),
    }


def _kernels(plan: ModelPlan, target: PlanTarget) -> list[dict[str, Any]]:
    """Expert kernels that ask for dynamic shared memory, by entry the variant that asks for most."""
    found: dict[str, BlockBudget] = {}
    for launch in (launch for bucket in plan.reduced.buckets for launch in bucket.launches):
        for call in launch.calls if launch.kernel in EXPERT_OPERATORS else ():
            budget = BlockBudget(call.variant.entry, call.block, None, call.shared_bytes)
            if budget.shared_bytes > (found[budget.kernel].shared_bytes if budget.kernel in found else 0):
                found[budget.kernel] = budget
    sm = SM_LIMITS.get(target.arch)
    if sm is None:
        return []
    return [
        {
            "kernel": budget.kernel,
            "threads": budget.threads,
            "shared_bytes": budget.shared_bytes,
            "most_shared_bytes": sm.block_shared_bytes,
            "most_registers": budget.most_registers(sm),
            "registers_of_sm": sm.registers,
            "blocks_per_sm": budget.blocks_per_sm(sm),
        }
        for _, budget in sorted(found.items())
    ]
