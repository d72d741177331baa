"""`dsv4c plan`: what a model needs on a target, from config and headers alone.

`make_plan` collects the facts, as JSON-ready data with stable keys; `text.py` and `html.py` show them.
Sizes are bytes, unless a key says otherwise; GB are decimal.
"""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from dsv4c.checkpoint.checkpoint import WeightInfo
from dsv4c.checkpoint.config import LayerKind
from dsv4c.checkpoint.tensor_classes import TensorClass, tensor_class
from dsv4c.errors import InputError, PlanError
from dsv4c.planning.build import build_needs
from dsv4c.planning.capacity import Capacity, Fit, default_context, stored_bytes
from dsv4c.planning.kernels import kernel_uses
from dsv4c.planning.layers import ModelPlan, plan_model
from dsv4c.planning.roofline import DecodeTraffic, decode_traffic
from dsv4c.planning.routed_experts import expert_budgets
from dsv4c.planning.source import PlanSource
from dsv4c.planning.splits import EP_SIZES, TP_SIZES, SplitCheck, check_ep, check_tp
from dsv4c.planning.targets import PlanTarget
from dsv4c.recipe import Recipe

CONTEXTS = (8192, 131072, 1048576)
SLOT_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
DRAFT_CLASS = "draft module"
_SHOWN_SLOTS = 16


@dataclass(frozen=True)
class PlanOptions:
    """What is asked: `context` positions (None: 8,192 or the model's) of `slots` sequences over tp x ep devices."""

    context: int | None = None
    slots: int = 1
    tp: int = 1
    ep: int = 1


def make_plan(source: PlanSource, target: PlanTarget, recipe: Recipe, options: PlanOptions) -> dict[str, Any]:
    """Everything that `dsv4c plan` says. Raises PlanError for an illegal split, InputError for a context too long."""
    context = options.context or default_context(source.config.max_position_embeddings)
    if context > source.config.max_position_embeddings:
        raise InputError(
            f"a context of {context:,} positions is beyond the model's {source.config.max_position_embeddings:,}",
            hint="`max_position_embeddings` in config.json is the limit",
        )
    plan = plan_model(source.config, source.weights, recipe)
    _require_legal("tp", check_tp(plan, options.tp), [tp for tp in TP_SIZES if check_tp(plan, tp).legal])
    legal_eps = [ep for ep in EP_SIZES if check_ep(source.config, ep).legal]
    _require_legal("ep", check_ep(source.config, options.ep), legal_eps)
    capacity = Capacity(plan, target, source)
    split = (options.tp, options.ep)
    fit = capacity.fit(options.slots, context, *split)
    serving = split if fit.fits else capacity.smallest_split(options.slots, context)
    return {
        "source": _source(source),
        "model": _model(source),
        "target": {**asdict(target), "usable_bytes": target.usable_bytes},
        "recipe": recipe.to_dict(),
        "weights": _weights(source, plan, capacity),
        "state": _state(plan, context),
        "buckets": [asdict(bucket) for bucket in plan.buckets],
        "build": build_needs(source, plan),
        "capacity": _capacity(capacity, fit, options, context, serving),
        "splits": _splits(plan, capacity, options, context),
        "kernels": [asdict(use) for use in kernel_uses(plan)],
        "experts": expert_budgets(plan, recipe, target),
        "decode": _decode(decode_traffic(plan), capacity, options, context, serving or split),
        "warnings": source.warnings,
    }


def _require_legal(name: str, check: SplitCheck, legal: list[int]) -> None:
    if not check.legal:
        raise PlanError(
            f"{name} {check.ranks} is not possible: {'; '.join(check.reasons)}",
            hint=f"choose --{name} {', '.join(map(str, legal))}",
        )


def _source(source: PlanSource) -> dict[str, Any]:
    weights = [*source.weights.values(), *source.draft_weights.values()]
    return {
        "path": str(source.path),
        "encodings_assumed": source.assumed,
        "naming": source.naming,
        "shards": source.shards,
        "tensors": sum(map(_tensor_count, weights)),
        "payload_bytes": sum(map(stored_bytes, weights)),
    }


def _tensor_count(info: WeightInfo) -> int:
    """Scales are tensors of their own."""
    return 2 if info.scales else 1


def _model(source: PlanSource) -> dict[str, Any]:
    config, identity = source.config, source.identity
    kinds = Counter(
        layer.kind.value if layer.kind is LayerKind.WINDOW else f"{layer.kind.value}/{layer.ratio}"
        for layer in config.layers
    )
    return {
        "family": identity.family if identity else None,
        "release": identity.release if identity else None,
        "name": identity.to_text() if identity else None,
        "draft": source.draft,
        "layers": dict(kinds),
        "hash_routed_layers": sum(layer.hash_routed for layer in config.layers),
        "hidden_size": config.hidden_size,
        "heads": config.num_attention_heads,
        "experts": config.n_routed_experts,
        "experts_per_token": config.num_experts_per_tok,
        "vocab_size": config.vocab_size,
        "max_context": config.max_position_embeddings,
    }


def _weights(source: PlanSource, plan: ModelPlan, capacity: Capacity) -> dict[str, Any]:
    """By class and by encoding, in the checkpoint and in the engine."""
    stored: Counter[tuple[str, str]] = Counter()
    tensors: Counter[tuple[str, str]] = Counter()
    for infos, draft in ((source.weights, False), (source.draft_weights, True)):
        for name, info in infos.items():
            key = (DRAFT_CLASS if draft else tensor_class(name).value, info.encoding.value)
            stored[key] += stored_bytes(info)
            tensors[key] += _tensor_count(info)
    rows = [*(kind.value for kind in TensorClass), DRAFT_CLASS]
    engine = plan.class_totals()
    return {
        "payload_bytes": stored.total(),
        "engine_bytes": plan.weight_bytes,
        "draft_bytes": capacity.draft_bytes,
        "classes": [
            {"class": kind, "encoding": encoding, "tensors": tensors[kind, encoding], "size_bytes": size}
            for (kind, encoding), size in sorted(stored.items(), key=lambda item: (rows.index(item[0][0]), item[0][1]))
        ],
        "engine_classes": [
            {
                "class": total.kind.value if total.kind else "constants",
                "encoding": total.encoding.value,
                "tensors": total.tensors,
                "size_bytes": total.size_bytes,
            }
            for total in engine
        ],
        "encodings": [
            {"encoding": name, "size_bytes": sum(size for key, size in stored.items() if key[1] == name)}
            for name in sorted({encoding for _, encoding in stored})
        ],
    }


def _state(plan: ModelPlan, context: int) -> dict[str, Any]:
    per_token = plan.block_bytes / plan.reduced.block_tokens
    longest = plan.config.max_position_embeddings
    contexts = sorted({context, *(size for size in CONTEXTS if size <= longest)})
    return {
        "slot_bytes": plan.slot_bytes,
        "rollback_bytes": plan.rollback_bytes,
        "rollback_rows": plan.reduced.rollback_rows,
        "block_tokens": plan.reduced.block_tokens,
        "block_bytes": plan.block_bytes,
        "bytes_per_token": per_token,
        "session_bytes": plan.session_bytes,
        "contexts": [
            {
                "context": size,
                "bytes": plan.state_bytes(1, size),
                "bytes_without_rollback": plan.state_bytes(1, size) - plan.rollback_bytes,
            }
            for size in contexts
        ],
    }


def _fit(fit: Fit) -> dict[str, Any]:
    return {
        "memory_bytes": fit.memory,
        "reserved_bytes": fit.reserved,
        "weight_bytes": fit.weights,
        "state_bytes": fit.state,
        "arena_bytes": fit.arena,
        "needed_bytes": fit.needed,
        "margin_bytes": fit.margin,
        "fits": fit.fits,
    }


def _capacity(
    capacity: Capacity, fit: Fit, options: PlanOptions, context: int, serving: tuple[int, int] | None
) -> dict[str, Any]:
    slots = options.slots
    part = None if fit.fits else capacity.slice(slots, context)
    return {
        "context": context,
        "slots": slots,
        "tp": options.tp,
        "ep": options.ep,
        **_fit(fit),
        "largest_context": capacity.largest_context(slots, options.tp, options.ep),
        "largest_slots": capacity.largest_slots(context, options.tp, options.ep),
        "devices_by_capacity": capacity.devices(slots, context),
        "split": None
        if serving is None
        else {
            "tp": serving[0],
            "ep": serving[1],
            "devices": serving[0] * serving[1],
            **_fit(capacity.fit(slots, context, *serving)),
            "largest_context": capacity.largest_context(slots, *serving),
            "largest_slots": capacity.largest_slots(context, *serving),
        },
        "one_device_holds": None if part is None else asdict(part),
    }


def _splits(plan: ModelPlan, capacity: Capacity, options: PlanOptions, context: int) -> dict[str, Any]:
    tps = [check_tp(plan, tp) for tp in sorted({*TP_SIZES, options.tp})]
    eps = [check_ep(plan.config, ep) for ep in sorted({*EP_SIZES, options.ep})]

    def row(check: SplitCheck, tp: int, ep: int) -> dict[str, Any]:
        fit = capacity.fit(options.slots, context, tp, ep)
        return {
            "ranks": check.ranks,
            "legal": check.legal,
            "reasons": list(check.reasons),
            "weight_bytes": fit.weights if check.legal else None,
            "fits": fit.fits if check.legal else None,
        }

    return {
        "tp": [row(check, check.ranks, 1) for check in tps],
        "ep": [row(check, 1, check.ranks) for check in eps],
        "replicated": "latent projections, compressors, indexer, router, norms, mHC, and the state: one key/value head",
    }


def _decode(
    traffic: DecodeTraffic, capacity: Capacity, options: PlanOptions, context: int, split: tuple[int, int]
) -> dict[str, Any]:
    """Roofline of decoding on the split that fits (or, where none does, as if it did)."""
    target = capacity.target
    contexts = sorted({context, *(size for size in CONTEXTS if size <= capacity.plan.config.max_position_embeddings)})
    slot_counts = sorted({options.slots, *(n for n in SLOT_COUNTS if n <= max(options.slots, _SHOWN_SLOTS))})
    bandwidth = target.best_bandwidth
    return {
        "tp": split[0],
        "ep": split[1],
        "bandwidth": bandwidth,
        "weight_bytes_per_step": round(traffic.weight_bytes(1, *split)),
        "flops_per_token": traffic.flops(context),
        "contexts": [
            {
                "context": size,
                "state_bytes": traffic.state_bytes(size),
                "bytes_per_token": round(traffic.step_bytes(1, size)),
                "flops_per_token": traffic.flops(size),
            }
            for size in contexts
        ],
        "tokens_per_second": [
            {
                "slots": slots,
                "context": size,
                "bytes_per_step": round(traffic.step_bytes(slots, size, *split)),
                "fits": capacity.fit(slots, size, *split).fits,
                "tokens_per_second": traffic.tokens_per_second(slots, size, bandwidth, target.flops, *split)
                if bandwidth
                else None,
            }
            for size in contexts
            for slots in slot_counts
        ],
    }
