"""The tensors that a layer or draft module has: official name -> logical shape ([out, in] for matrices)."""

from dsv4c.checkpoint.config import LayerConfig, LayerKind, ModelConfig

Shapes = dict[str, tuple[int, ...]]
DRAFT_LAYER = LayerConfig(LayerKind.WINDOW, ratio=0, hash_routed=False)


def head_shapes(config: ModelConfig, prefix: str = "") -> Shapes:
    """What turns the last layer's streams into the input of the output matrix."""
    streams = config.hc_mult
    return {
        f"{prefix}norm.weight": (config.hidden_size,),
        f"{prefix}hc_head_fn": (streams, streams * config.hidden_size),
        f"{prefix}hc_head_base": (streams,),
        f"{prefix}hc_head_scale": (1,),
    }


def _compressor_shapes(prefix: str, config: ModelConfig, ratio: int, width: int) -> Shapes:
    return {
        f"{prefix}.ape": (ratio, width),
        f"{prefix}.wkv.weight": (width, config.hidden_size),
        f"{prefix}.wgate.weight": (width, config.hidden_size),
    }


def _attention_shapes(prefix: str, config: ModelConfig, layer: LayerConfig) -> Shapes:
    hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
    shapes: Shapes = {
        f"{prefix}.attn_sink": (heads,),
        f"{prefix}.wq_a.weight": (config.q_lora_rank, hidden),
        f"{prefix}.q_norm.weight": (config.q_lora_rank,),
        f"{prefix}.wq_b.weight": (heads * head_dim, config.q_lora_rank),
        f"{prefix}.wkv.weight": (head_dim, hidden),
        f"{prefix}.kv_norm.weight": (head_dim,),
        f"{prefix}.wo_a.weight": (config.o_groups * config.o_lora_rank, heads // config.o_groups * head_dim),
        f"{prefix}.wo_b.weight": (hidden, config.o_groups * config.o_lora_rank),
    }
    if layer.kind is LayerKind.WINDOW:
        return shapes
    # CSA entries overlap: one set of channels for a token's own group, one for the next group.
    overlap = 2 if layer.kind is LayerKind.CSA else 1
    shapes |= _compressor_shapes(f"{prefix}.compressor", config, layer.ratio, overlap * head_dim)
    shapes[f"{prefix}.compressor.norm.weight"] = (head_dim,)
    if layer.kind is LayerKind.CSA:
        index_dim, index_heads = config.index_head_dim, config.index_n_heads
        shapes[f"{prefix}.indexer.wq_b.weight"] = (index_heads * index_dim, config.q_lora_rank)
        shapes[f"{prefix}.indexer.weights_proj.weight"] = (index_heads, hidden)
        shapes |= _compressor_shapes(f"{prefix}.indexer.compressor", config, layer.ratio, overlap * index_dim)
        shapes[f"{prefix}.indexer.compressor.norm.weight"] = (index_dim,)
    return shapes


def _expert_shapes(prefix: str, config: ModelConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    return {
        f"{prefix}.w1.weight": (inner, hidden),
        f"{prefix}.w2.weight": (hidden, inner),
        f"{prefix}.w3.weight": (inner, hidden),
    }


def layer_shapes(prefix: str, config: ModelConfig, layer: LayerConfig) -> Shapes:
    """One layer; `prefix` is such as `layers.0`."""
    hidden, streams = config.hidden_size, config.hc_mult
    mix = (2 + streams) * streams
    shapes: Shapes = {f"{prefix}.attn_norm.weight": (hidden,), f"{prefix}.ffn_norm.weight": (hidden,)}
    for part in ("attn", "ffn"):
        shapes[f"{prefix}.hc_{part}_fn"] = (mix, streams * hidden)
        shapes[f"{prefix}.hc_{part}_base"] = (mix,)
        shapes[f"{prefix}.hc_{part}_scale"] = (3,)
    shapes |= _attention_shapes(f"{prefix}.attn", config, layer)
    shapes[f"{prefix}.ffn.gate.weight"] = (config.n_routed_experts, hidden)
    if layer.hash_routed:
        shapes[f"{prefix}.ffn.gate.tid2eid"] = (config.vocab_size, config.num_experts_per_tok)
    else:
        shapes[f"{prefix}.ffn.gate.bias"] = (config.n_routed_experts,)
    shapes |= _expert_shapes(f"{prefix}.ffn.shared_experts", config)
    for expert in range(config.n_routed_experts):
        shapes |= _expert_shapes(f"{prefix}.ffn.experts.{expert}", config)
    return shapes


def mtp_shapes(config: ModelConfig, stages: int) -> Shapes:
    """`stages` MTP blocks: each a window layer with its own input projections and head."""
    hidden = config.hidden_size
    shapes: Shapes = {}
    for stage in range(stages):
        prefix = f"mtp.{stage}"
        shapes |= layer_shapes(prefix, config, DRAFT_LAYER) | head_shapes(config, f"{prefix}.")
        shapes |= {f"{prefix}.{name}.weight": (hidden, hidden) for name in ("e_proj", "h_proj")}
        shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in ("enorm", "hnorm")}
    return shapes


def dspark_shapes(config: ModelConfig, stages: int, features: int, markov_rank: int) -> Shapes:
    """`stages` DSpark layers over the outputs of `features` main layers."""
    hidden, last = config.hidden_size, f"mtp.{stages - 1}"
    shapes: Shapes = {
        "mtp.0.main_proj.weight": (hidden, features * hidden),
        "mtp.0.main_norm.weight": (hidden,),
        f"{last}.markov_head.markov_w1.weight": (config.vocab_size, markov_rank),
        f"{last}.markov_head.markov_w2.weight": (config.vocab_size, markov_rank),
        f"{last}.confidence_head.proj.weight": (1, hidden + markov_rank),
    }
    for stage in range(stages):
        shapes |= layer_shapes(f"mtp.{stage}", config, DRAFT_LAYER)
    return shapes | head_shapes(config, f"{last}.")
