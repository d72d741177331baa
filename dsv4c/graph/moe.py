"""Router and experts in plain aten (spec 2.11)."""

import operator

import torch
from torch.fx import Node

from dsv4c.checkpoint.config import ModelConfig
from dsv4c.graph.emit import Emitter

aten = torch.ops.aten


def scores(emit: Emitter, logits: Node) -> Node:
    """sqrt(softplus(logits)), float32 [T, E]."""
    softplus = emit.call("ffn_softplus", aten.softplus.default, logits)
    return emit.call("ffn_scores", aten.sqrt.default, softplus)


def choose_by_score(emit: Emitter, expert_scores: Node, bias: Node, config: ModelConfig) -> Node:
    """Ids int64 [T, k] of the largest score + bias; the bias takes part in the selection only."""
    biased = emit.call("ffn_biased", aten.add.Tensor, expert_scores, bias)
    top = emit.call("ffn_top", aten.topk.default, biased, config.num_experts_per_tok)
    return emit.call("ffn_ids", operator.getitem, top, 1)


def choose_by_token(emit: Emitter, token_ids: Node, table: Node) -> Node:
    """Ids int64 [T, k] from the hash table int64 [V, k]."""
    return emit.call("ffn_ids", aten.index.Tensor, table, [token_ids])


def route_weights(emit: Emitter, expert_scores: Node, ids: Node, config: ModelConfig) -> Node:
    """Scores of the chosen experts, normalised to a sum of the routed scaling factor: float32 [T, k]."""
    chosen = emit.call("ffn_chosen", aten.gather.default, expert_scores, 1, ids)
    total = emit.call("ffn_total", aten.sum.dim_IntList, chosen, [-1], True)
    total = emit.call("ffn_total_eps", aten.add.Tensor, total, 1e-20)
    share = emit.call("ffn_share", aten.div.Tensor, chosen, total)
    return emit.call("ffn_weights", aten.mul.Tensor, share, config.routed_scaling_factor)


def _swiglu(emit: Emitter, name: str, gate: Node, up: Node, limit: float) -> Node:
    gate = emit.call(f"{name}_gate_clamped", aten.clamp_max.default, gate, limit)
    up = emit.call(f"{name}_up_clamped", aten.clamp.default, up, -limit, limit)
    gate = emit.call(f"{name}_silu", aten.silu.default, gate)
    return emit.call(f"{name}_act", aten.mul.Tensor, gate, up)


def routed_experts(
    emit: Emitter, x: Node, ids: Node, weights: Node, w13: Node, w2: Node, config: ModelConfig, dtype: torch.dtype
) -> Node:
    """The weighted sum of the chosen experts, as a batched gather: float32 [T, D].

    x [T, D], ids [T, k], weights [T, k], w13 [E, 2I, D], w2 [E, D, I]. Builds [T, k, 2I, D]: for reading and for
    checking small models; `fuse_expert_ffn` replaces it.
    """
    k, inner, hidden = config.num_experts_per_tok, config.moe_intermediate_size, config.hidden_size
    column = emit.call("ffn_column", aten.unsqueeze.default, emit.f32("ffn_x", x), -1)
    first = emit.call("ffn_w13", aten.index.Tensor, w13, [ids])
    first = emit.call("ffn_w13_flat", aten.reshape.default, first, [-1, k * 2 * inner, hidden])
    gate_up = emit.call("ffn_gate_up_flat", aten.bmm.default, first, column)
    gate_up = emit.call("ffn_gate_up", aten.reshape.default, gate_up, [-1, k, 2 * inner])
    gate = emit.call("ffn_gate", aten.slice.Tensor, gate_up, 2, 0, inner)
    up = emit.call("ffn_up", aten.slice.Tensor, gate_up, 2, inner, 2 * inner)
    act = _swiglu(emit, "ffn", gate, up, config.swiglu_limit)
    wide = emit.call("ffn_weights_wide", aten.unsqueeze.default, weights, -1)
    act = emit.call("ffn_weighted", aten.mul.Tensor, act, wide)
    act = emit.f32("ffn_h", emit.cast("ffn_h", act, dtype))
    act = emit.call("ffn_h_column", aten.reshape.default, act, [-1, inner, 1])
    second = emit.call("ffn_w2", aten.index.Tensor, w2, [ids])
    second = emit.call("ffn_w2_flat", aten.reshape.default, second, [-1, hidden, inner])
    parts = emit.call("ffn_parts_flat", aten.bmm.default, second, act)
    parts = emit.call("ffn_parts", aten.reshape.default, parts, [-1, k, hidden])
    return emit.call("ffn_routed", aten.sum.dim_IntList, parts, [1])


def shared_expert(
    emit: Emitter, x: Node, w1: Node, w3: Node, w2: Node, config: ModelConfig, dtype: torch.dtype
) -> Node:
    """The shared expert, clamped like the routed ones and unscaled: [T, D] of `dtype`."""
    wide = emit.f32("shared_x", x)
    gate = emit.call("shared_gate", aten.linear.default, wide, w1)
    up = emit.call("shared_up", aten.linear.default, wide, w3)
    act = emit.cast("shared_h", _swiglu(emit, "shared", gate, up, config.swiglu_limit), dtype)
    down = emit.call("shared_down", aten.linear.default, emit.f32("shared_h", act), w2)
    return emit.cast("shared_out", down, dtype)
