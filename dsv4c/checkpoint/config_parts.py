"""Parts of a `config.json` that stand alone: architecture, quantisation, rotary size, token ids."""

from collections.abc import Mapping

from dsv4c.checkpoint.config_fields import ConfigFields

# Keys whose other values mean another computation. An empty tuple: V4 has no such key.
_FIXED: Mapping[str, tuple[object, ...]] = {
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "tie_word_embeddings": (False,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "num_key_value_heads": (1,),
    "n_shared_experts": (1,),
    "n_group": (1,),
    "topk_group": (1,),
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
    "attention_dropout": (0, 0.0),
    "compress_rate_csa": (),
    "compress_rate_hca": (),
    "vision_config": (),
    "text_config": (),
    "kv_source_layer_ids": (),
    "index_source_layer_ids": (),
}


def check_architecture(fields: ConfigFields) -> str:
    """`model_type`; raises CheckpointError for another architecture or a variant that V4 does not define."""
    architectures = fields.data.get("architectures") or []
    if not isinstance(architectures, list):
        raise fields.wrong("architectures", "a list")
    model_type = fields.text("model_type")
    if model_type == "deepseek_v41" or "DeepseekV41ForCausalLM" in architectures:
        raise fields.error(
            "DeepSeek-V4.1 (`deepseek_v41`, DeepseekV41ForCausalLM) is not supported yet",
            hint="it is not loadable as V4: its attention, hyper-connections and cache differ",
        )
    if model_type != "deepseek_v4":
        raise fields.error(f"`model_type` is {model_type!r}, expected 'deepseek_v4'")
    if architectures and architectures != ["DeepseekV4ForCausalLM"]:
        raise fields.wrong("architectures", "['DeepseekV4ForCausalLM']")
    for key, allowed in _FIXED.items():
        fields.only(key, *allowed)
    return model_type


def parse_quantization(fields: ConfigFields) -> tuple[tuple[int, int], str | None]:
    """(rows and columns of an FP8 block, expert dtype)."""
    fields.only("expert_dtype", "fp4")
    expert_dtype = "fp4" if fields.has("expert_dtype") else None
    quantization = fields.nested("quantization_config")
    if quantization is None:
        return (128, 128), expert_dtype
    hint = "dsv4c reads FP8 e4m3 block-scaled, FP4, bf16 and fp32 checkpoints; convert the checkpoint"
    for key, expected in (("quant_method", "fp8"), ("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        value = quantization.data.get(key, None if key == "quant_method" else expected)
        if value != expected:
            raise fields.error(f"`quantization_config.{key}` is {value!r}; dsv4c reads {expected!r}", hint=hint)
    quantization.only("expert_dtype", "fp4")
    expert_dtype = "fp4" if quantization.has("expert_dtype") else expert_dtype
    if not quantization.has("weight_block_size"):
        return (128, 128), expert_dtype
    block = quantization.integers("weight_block_size", 1)
    if len(block) != 2:
        raise quantization.wrong("weight_block_size", "two sizes: rows, columns")
    return (block[0], block[1]), expert_dtype


def parse_rotary_dim(fields: ConfigFields, head_dim: int) -> int:
    """How many of a head's channels (the last ones) rotate: even, at most `head_dim`."""
    rotary_dim = fields.integer("qk_rope_head_dim") if fields.has("qk_rope_head_dim") else None
    parameters = fields.nested("rope_parameters")
    inner = [parameters.nested(key) for key in ("main", "compress")] if parameters else []
    for part in [fields, *(item for item in inner if item)]:
        if not part.has("partial_rotary_factor"):
            continue
        size = part.number("partial_rotary_factor") * head_dim
        # A factor such as 1/3 is rounded in JSON.
        if abs(size - round(size)) > 1e-3:
            raise part.wrong("partial_rotary_factor", f"a whole number of the {head_dim} channels of a head")
        if rotary_dim is not None:
            key = f"{part.prefix}partial_rotary_factor"
            fields.agree(f"{key} (of {head_dim})", round(size), "qk_rope_head_dim", rotary_dim)
        rotary_dim = round(size)
    if rotary_dim is None:
        raise fields.error("neither `qk_rope_head_dim` nor `partial_rotary_factor` is present")
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise fields.error(f"the rotary part of a head is {rotary_dim} channels, expected even and at most {head_dim}")
    return rotary_dim


def parse_token_ids(fields: ConfigFields, key: str, vocab_size: int) -> tuple[int, ...]:
    """A token id, a list of them, or null."""
    if not fields.has(key):
        return ()
    ids = fields.integers(key, 0) if isinstance(fields.data[key], list) else [fields.integer(key, minimum=0)]
    if any(token >= vocab_size for token in ids):
        raise fields.wrong(key, f"ids below `vocab_size` ({vocab_size})")
    return tuple(dict.fromkeys(ids))
