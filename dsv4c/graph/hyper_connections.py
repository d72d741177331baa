"""Manifold-constrained hyper-connections (mHC) in plain aten (spec 2.1 and 2.2)."""

import torch
from torch.fx import Node

from dsv4c.checkpoint.config import ModelConfig
from dsv4c.graph.emit import Emitter

aten = torch.ops.aten


def _mixer_logits(emit: Emitter, name: str, streams: Node, fn: Node, config: ModelConfig) -> Node:
    width = config.hc_mult * config.hidden_size
    flat = emit.call(f"{name}_flat", aten.reshape.default, streams, [-1, width])
    flat = emit.f32(f"{name}_flat", flat)
    normed = emit.call(f"{name}_rms", aten.rms_norm.default, flat, [width], None, config.rms_norm_eps)
    return emit.call(f"{name}_logits", aten.linear.default, normed, fn)


def _affine(emit: Emitter, name: str, logits: Node, scale: Node, base: Node, part: int, start: int, size: int) -> Node:
    """logits[:, start:start+size] * scale[part] + base[start:start+size]."""
    sliced = emit.call(f"{name}_slice", aten.slice.Tensor, logits, 1, start, start + size)
    factor = emit.call(f"{name}_scale", aten.select.int, scale, 0, part)
    scaled = emit.call(f"{name}_scaled", aten.mul.Tensor, sliced, factor)
    offset = emit.call(f"{name}_base", aten.slice.Tensor, base, 0, start, start + size)
    return emit.call(f"{name}_affine", aten.add.Tensor, scaled, offset)


def _collapse(emit: Emitter, name: str, pre: Node, streams: Node, dtype: torch.dtype) -> Node:
    """sum_i pre_i X_i: [T, n] and [T, n, D] -> [T, D]."""
    weight = emit.call(f"{name}_pre_wide", aten.unsqueeze.default, pre, -1)
    weighted = emit.call(f"{name}_weighted", aten.mul.Tensor, weight, emit.f32(f"{name}_streams", streams))
    return emit.cast(f"{name}_in", emit.call(f"{name}_in", aten.sum.dim_IntList, weighted, [1]), dtype)


def mix(
    emit: Emitter,
    name: str,
    streams: Node,
    fn: Node,
    scale: Node,
    base: Node,
    config: ModelConfig,
    dtype: torch.dtype,
) -> tuple[Node, Node, Node]:
    """The mixer of one sublayer: (collapsed input [T, D], post [T, n], comb [T, n, n])."""
    n, eps = config.hc_mult, config.hc_eps
    logits = _mixer_logits(emit, name, streams, fn, config)
    pre = emit.call(f"{name}_pre_sig", aten.sigmoid.default, _affine(emit, f"{name}_pre", logits, scale, base, 0, 0, n))
    pre = emit.call(f"{name}_pre", aten.add.Tensor, pre, eps)
    post = emit.call(
        f"{name}_post_sig", aten.sigmoid.default, _affine(emit, f"{name}_post", logits, scale, base, 1, n, n)
    )
    post = emit.call(f"{name}_post", aten.mul.Tensor, post, 2)
    comb = _affine(emit, f"{name}_comb", logits, scale, base, 2, 2 * n, n * n)
    comb = emit.call(f"{name}_comb_square", aten.reshape.default, comb, [-1, n, n])
    comb = emit.call(f"{name}_comb_soft", aten.softmax.int, comb, -1)
    comb = emit.call(f"{name}_comb_eps", aten.add.Tensor, comb, eps)
    # Sinkhorn: columns first, then rows and columns; the first column step counts as an iteration.
    for axis in [1] + [2, 1] * (config.hc_sinkhorn_iters - 1):
        total = emit.call(f"{name}_comb_sum", aten.sum.dim_IntList, comb, [axis], True)
        total = emit.call(f"{name}_comb_sum_eps", aten.add.Tensor, total, eps)
        comb = emit.call(f"{name}_comb", aten.div.Tensor, comb, total)
    return _collapse(emit, name, pre, streams, dtype), post, comb


def combine(emit: Emitter, name: str, y: Node, streams: Node, post: Node, comb: Node, dtype: torch.dtype) -> Node:
    """X'_k = post_k * y + sum_j comb[j, k] X_j: [T, n, D]."""
    transposed = emit.call(f"{name}_comb_t", aten.transpose.int, comb, 1, 2)
    mixed = emit.call(f"{name}_mixed", aten.bmm.default, transposed, emit.f32(f"{name}_residual", streams))
    wide_post = emit.call(f"{name}_post_wide", aten.unsqueeze.default, post, -1)
    wide_y = emit.call(f"{name}_y_wide", aten.unsqueeze.default, emit.f32(f"{name}_y", y), 1)
    expanded = emit.call(f"{name}_expanded", aten.mul.Tensor, wide_post, wide_y)
    return emit.cast(f"{name}_out", emit.call(f"{name}_out", aten.add.Tensor, expanded, mixed), dtype)


def head(
    emit: Emitter, streams: Node, fn: Node, scale: Node, base: Node, config: ModelConfig, dtype: torch.dtype
) -> Node:
    """The final collapse: [R, n, D] -> [R, D]; one scale, no Sinkhorn."""
    logits = _mixer_logits(emit, "hc_head", streams, fn, config)
    scaled = emit.call("hc_head_scaled", aten.mul.Tensor, logits, scale)
    affine = emit.call("hc_head_affine", aten.add.Tensor, scaled, base)
    pre = emit.call("hc_head_sig", aten.sigmoid.default, affine)
    pre = emit.call("hc_head_pre", aten.add.Tensor, pre, config.hc_eps)
    return _collapse(emit, "hc_head", pre, streams, dtype)
