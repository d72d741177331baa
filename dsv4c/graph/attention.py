"""The attention sublayer: queries, the shared key/value, compressor, indexer, output projection (spec 2.4 to 2.10)."""

import torch
from torch.fx import Node

from dsv4c.checkpoint.config import LayerConfig, LayerKind
from dsv4c.graph.scope import LayerScope
from dsv4c.graph.state_ops import INDEX_GROUP, KV_GROUP, Rounding
from dsv4c.step_abi import StateKind

aten, dsv4 = torch.ops.aten, torch.ops.dsv4


def attention(scope: LayerScope, layer: LayerConfig, x: Node) -> Node:
    """The sublayer's output [T, D] for its normalised input x [T, D]."""
    config, inputs = scope.config, scope.inputs
    nope = config.head_dim - config.rotary_dim
    freqs = scope.frequencies(compressed=layer.kind is not LayerKind.WINDOW)

    latent = scope.linear("q_a", x, "attn.wq_a.weight", config.q_lora_rank, config.hidden_size)
    latent = scope.norm("q_latent", latent, "attn.q_norm.weight", config.q_lora_rank)
    q = scope.linear(
        "q_b", latent, "attn.wq_b.weight", config.num_attention_heads * config.head_dim, config.q_lora_rank
    )
    q = scope.call("q_heads", aten.reshape.default, q, [-1, config.num_attention_heads, config.head_dim])
    q = scope.norm("q_normed", q, None, config.head_dim)
    q = scope.call("q", dsv4.rope.default, q, inputs.positions, freqs, False)

    kv = scope.linear("kv_proj", x, "attn.wkv.weight", config.head_dim, config.hidden_size)
    kv = scope.norm("kv_normed", kv, "attn.kv_norm.weight", config.head_dim)
    kv = scope.call("kv", dsv4.rope.default, kv, inputs.positions, freqs, False)
    if scope.simulates_quantization:
        kv = scope.call("kv_fp8", dsv4.fp8_round.default, kv, KV_GROUP, nope)

    ring = scope.state("ring", StateKind.SLOT, config.sliding_window + scope.model.rollback_rows, 1, (config.head_dim,))
    entries, selected = None, None
    if layer.kind is not LayerKind.WINDOW:
        entries = _compress(scope, layer, x, freqs, "attn.compressor", config.head_dim, "entries")
    if layer.kind is LayerKind.CSA:
        selected = _select(scope, layer, x, latent, freqs)
    out = scope.call(
        "attention",
        dsv4.attention.default,
        q,
        kv,
        ring,
        None,
        entries,
        None,
        selected,
        scope.parameter("attn.attn_sink", (config.num_attention_heads,)),
        inputs.slots,
        inputs.positions,
        inputs.block_table,
        config.sliding_window,
        max(layer.ratio, 1),
        config.rotary_dim,
        config.head_dim**-0.5,
    )
    # After the attention: a step longer than the window still needs the old rows.
    scope.call("commit", dsv4.commit_ring.default, kv, ring, None, inputs.slots, inputs.positions, config.rotary_dim)
    # The values carried their rotation along; the conjugate at the query's position takes it off.
    out = scope.call("unrotated", dsv4.rope.default, out, inputs.positions, freqs, True)
    return _project_out(scope, out)


def _compress(scope: LayerScope, layer: LayerConfig, x: Node, freqs: Node, prefix: str, width: int, plane: str) -> Node:
    """Update the open groups and the compressed entries of `prefix`; returns the entries plane."""
    config, inputs = scope.config, scope.inputs
    overlap = layer.kind is LayerKind.CSA
    projected = 2 * width if overlap else width
    name = "index" if plane == "index_keys" else "compress"
    # The reference program runs the compressor in fp32.
    kv = scope.linear(f"{name}_kv", x, f"{prefix}.wkv.weight", projected, config.hidden_size, dtype=torch.float32)
    gate = scope.linear(f"{name}_gate", x, f"{prefix}.wgate.weight", projected, config.hidden_size, dtype=torch.float32)
    # An overlapping entry pools two groups, so a rollback may need the tokens of both again.
    depth = layer.ratio * (2 if overlap else 1) + scope.model.rollback_rows
    groups = scope.state(f"{name}_groups", StateKind.SLOT, depth, 1, (2, projected), dtype=torch.float32)
    entries = scope.state(plane, StateKind.BLOCK, scope.model.block_tokens // layer.ratio, layer.ratio, (width,))
    rounding = Rounding.NONE
    if scope.simulates_quantization:
        rounding = Rounding.HADAMARD_FP4 if plane == "index_keys" else Rounding.FP8
    scope.call(
        f"{name}_update",
        dsv4.compress.default,
        kv,
        gate,
        scope.parameter(f"{prefix}.ape", (layer.ratio, projected)),
        scope.parameter(f"{prefix}.norm.weight", (width,)),
        freqs,
        inputs.slots,
        inputs.positions,
        inputs.block_table,
        groups,
        entries,
        None,
        layer.ratio,
        overlap,
        config.rms_norm_eps,
        int(rounding),
        scope.act_dtype,
    )
    return entries


def _select(scope: LayerScope, layer: LayerConfig, x: Node, latent: Node, freqs: Node) -> Node:
    """The lightning indexer: ids of the entries each row attends to, int32 [T, K], K at most index_topk."""
    config, inputs = scope.config, scope.inputs
    heads, width = config.index_n_heads, config.index_head_dim
    keys = _compress(scope, layer, x, freqs, "attn.indexer.compressor", width, "index_keys")
    q = scope.linear("index_q_b", latent, "attn.indexer.wq_b.weight", heads * width, config.q_lora_rank)
    q = scope.call("index_q_heads", aten.reshape.default, q, [-1, heads, width])
    q = scope.call("index_q", dsv4.rope.default, q, inputs.positions, freqs, False)
    if scope.simulates_quantization:
        q = scope.call("index_q_hadamard", dsv4.hadamard.default, q)
        q = scope.call("index_q_fp4", dsv4.fp4_round.default, q, INDEX_GROUP)
    weights = scope.linear("index_weights", x, "attn.indexer.weights_proj.weight", heads, config.hidden_size)
    return scope.call(
        "selected",
        dsv4.select_entries.default,
        q,
        weights,
        keys,
        None,
        inputs.slots,
        inputs.positions,
        inputs.block_table,
        # No row sees more entries than the longest context has.
        min(config.index_topk, max(config.max_position_embeddings // layer.ratio, 1)),
        layer.ratio,
        width**-0.5 * heads**-0.5,
    )


def _project_out(scope: LayerScope, out: Node) -> Node:
    """Grouped low-rank output projection: [T, H, hd] -> [T, D] (spec 2.10)."""
    config = scope.config
    heads_width = config.num_attention_heads * config.head_dim
    rank = config.o_groups * config.o_lora_rank
    flat = scope.call("o_heads", aten.reshape.default, out, [-1, heads_width])
    weight = scope.parameter("attn.wo_a.weight", (rank, heads_width // config.o_groups))
    low = scope.call("o_a", dsv4.grouped_linear.default, flat, weight, None, 0, 0, config.o_groups)
    return scope.linear("o_b", low, "attn.wo_b.weight", config.hidden_size, rank)
