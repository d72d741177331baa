"""What the routed experts of a finished engine take of an SM and of the L2 cache, from its manifest alone."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dsv4c.planning.expert_budget import SM_LIMITS, RoutedExperts, kernel_budgets, l2_text
from dsv4c.planning.tables import size_text
from dsv4c.planning.targets import PLAN_TARGETS

_TOKENS = (1, 16)


def engine_budgets(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """JSON-ready; None where the engine's architecture has no SMs. `weights` is None without packed experts."""
    sm = SM_LIMITS.get(manifest["arch"])
    if sm is None:
        return None
    facts = manifest.get("experts")
    weights = None
    if facts:
        layer = RoutedExperts(
            len(facts["layers"]), facts["experts"] * facts["expert_bytes"], facts["experts"], facts["per_token"]
        )
        weights = {
            "one_bytes": layer.one_bytes,
            "layer_bytes": layer.size_bytes,
            "total_bytes": layer.count * layer.size_bytes,
            "hits": [{"tokens": tokens, "size_bytes": round(layer.hit_bytes(tokens))} for tokens in _TOKENS],
        }
    return {
        "sm": asdict(sm),
        "kernels": [
            {
                **asdict(budget),
                "block_registers": budget.block_registers,
                "blocks_per_sm": budget.blocks_per_sm(sm),
                "text": budget.to_text(sm),
            }
            for budget in kernel_budgets(manifest["machine_code"])
        ],
        "weights": weights,
        "l2_bytes": {
            target.product: target.l2_bytes
            for target in PLAN_TARGETS.values()
            if target.arch == manifest["arch"] and target.l2_bytes
        },
    }


def budget_lines(budgets: Mapping[str, Any]) -> list[str]:
    """The same for a terminal."""
    lines = []
    if budgets["kernels"]:
        lines = ["budgets     blocks of the expert kernels, the largest variant of each"]
        lines += [f"  {kernel['kernel']:<19}{kernel['text']}" for kernel in budgets["kernels"]]
    if weights := budgets["weights"]:
        hits = ", ".join(
            f"{size_text(hit['size_bytes'])} by {hit['tokens']} {'token' if hit['tokens'] == 1 else 'tokens'}"
            for hit in weights["hits"]
        )
        caches = ", ".join(f"{product} {l2_text(size)}" for product, size in budgets["l2_bytes"].items())
        lines += [
            f"one expert  {size_text(weights['one_bytes'])}, a layer's {size_text(weights['layer_bytes'])}, "
            f"all {size_text(weights['total_bytes'])}; hit in a layer, uniformly: {hits}",
            f"L2 cache    {caches}",
        ]
    return lines
