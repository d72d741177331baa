"""`config.json` of a DeepSeek-V4 checkpoint -> `ModelConfig`.

Two dialects: the official keys (`compress_ratios`, `num_hash_layers`, `qk_rope_head_dim`, `rope_scaling`) and those
of transformers (`layer_types`, `compress_rates`, `mlp_layer_types`, `partial_rotary_factor`, `rope_parameters`). A
config may carry both; then they must agree. What the model does not define is refused, not ignored.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dsv4c.checkpoint.config_fields import ConfigFields
from dsv4c.checkpoint.config_parts import check_architecture, parse_quantization, parse_rotary_dim, parse_token_ids
from dsv4c.checkpoint.safetensors import read_json
from dsv4c.errors import CheckpointError

CSA_RATIO = 4
_MAX_SINKHORN_ITERS = 64  # each is written out in the graph; the released models have 20
_MAX_BLOCK = 1 << 20
_MAX_EXPERTS = 1 << 18  # in all layers: ten times the largest model


class LayerKind(enum.Enum):
    """What a layer's attention sees besides the window: nothing, selected groups of 4, or all larger groups."""

    WINDOW = "window"
    CSA = "csa"
    HCA = "hca"


@dataclass(frozen=True)
class LayerConfig:
    """`ratio` is the number of tokens in a compressed entry, 0 for WINDOW; `hash_routed`: experts from `tid2eid`."""

    kind: LayerKind
    ratio: int
    hash_routed: bool


@dataclass(frozen=True)
class YarnScaling:
    """YaRN of the compressed layers' rotary frequencies; there is no magnitude factor."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class DraftModule:
    """The draft module that the config announces; `stages` blocks named `mtp.N`."""

    kind: Literal["mtp", "dspark"]
    stages: int


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V4 model. `layers` are the main layers only; `rotary_dim` counts the last channels of every head."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    rotary_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int
    sliding_window: int
    layers: tuple[LayerConfig, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    routed_scaling_factor: float
    swiglu_limit: float
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnScaling | None
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    weight_block_size: tuple[int, int]
    expert_dtype: str | None
    draft: DraftModule | None


_KINDS: Mapping[str, LayerKind] = {
    "sliding_attention": LayerKind.WINDOW,
    "compressed_sparse_attention": LayerKind.CSA,
    "heavily_compressed_attention": LayerKind.HCA,
}
_ROUTING: Mapping[str, bool] = {"hash_moe": True, "moe": False}
_YARN_KEYS = frozenset(
    ("type", "rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")
) | {"truncate", "rope_theta", "partial_rotary_factor"}


def _kind_of_ratio(ratio: int) -> LayerKind:
    if ratio == 0:
        return LayerKind.WINDOW
    return LayerKind.CSA if ratio == CSA_RATIO else LayerKind.HCA


def _parse_ratios(fields: ConfigFields, count: int) -> list[int]:
    """The compress ratio of every main layer."""
    by_type: list[str] | None = None
    if fields.has("layer_types"):
        by_type = fields.choices("layer_types", _KINDS, count)
    rates = fields.nested("compress_rates")
    if not fields.has("compress_ratios"):
        if by_type is None:
            raise fields.error(
                "neither `compress_ratios` nor `layer_types` is present",
                hint="the default of transformers equals no released model; take the model's own config.json",
            )
        if rates is None and set(by_type) != {"sliding_attention"}:
            raise fields.error("`layer_types` needs `compress_rates`, which is missing")
        ratios = []
        for kind in by_type:
            if rates is None or _KINDS[kind] is LayerKind.WINDOW:
                ratios.append(0)
                continue
            rate = rates.integer(kind)
            if (rate == CSA_RATIO) != (_KINDS[kind] is LayerKind.CSA):
                raise rates.wrong(kind, f"{CSA_RATIO} for CSA and another rate for HCA, as in every V4 model")
            ratios.append(rate)
        return ratios
    ratios = fields.integers("compress_ratios", 0)
    # More entries than layers: the rest are draft layers.
    if len(ratios) < count:
        raise fields.error(f"`compress_ratios` has {len(ratios)} entries, `num_hidden_layers` is {count}")
    ratios = ratios[:count]
    for index, kind in enumerate(by_type or []):
        ratio = ratios[index]
        fields.agree(
            f"layer_types[{index}]", _KINDS[kind].value, f"compress_ratios[{index}]", _kind_of_ratio(ratio).value
        )
        if rates is not None and ratio:
            fields.agree(f"compress_rates.{kind}", rates.integer(kind), f"compress_ratios[{index}]", ratio)
    return ratios


def _parse_layers(fields: ConfigFields, count: int) -> tuple[LayerConfig, ...]:
    ratios = _parse_ratios(fields, count)
    hash_routed: list[bool] | None = None
    if fields.has("num_hash_layers"):
        # May exceed the number of layers in a model cut to its first layers, like `compress_ratios`.
        hash_layers = fields.integer("num_hash_layers", minimum=0)
        hash_routed = [index < hash_layers for index in range(count)]
    if fields.has("mlp_layer_types"):
        by_type = [_ROUTING[item] for item in fields.choices("mlp_layer_types", _ROUTING, count)]
        if hash_routed is not None:
            for index, pair in enumerate(zip(by_type, hash_routed, strict=True)):
                names = ["hash_moe" if item else "moe" for item in pair]
                fields.agree(f"mlp_layer_types[{index}]", names[0], f"num_hash_layers (layer {index})", names[1])
        hash_routed = by_type
    if hash_routed is None:
        raise fields.error("neither `num_hash_layers` nor `mlp_layer_types` is present")
    return tuple(
        LayerConfig(_kind_of_ratio(ratio), ratio, hashed) for ratio, hashed in zip(ratios, hash_routed, strict=True)
    )


def _parse_yarn(fields: ConfigFields) -> YarnScaling | None:
    for key in ("type", "rope_type"):
        fields.only(key, "default", "yarn")
    if fields.has("type") and fields.has("rope_type"):
        fields.agree(f"{fields.prefix}type", fields.data["type"], f"{fields.prefix}rope_type", fields.data["rope_type"])
    for key in fields.data:
        if key not in _YARN_KEYS:
            fields.only(key)
    if (fields.data.get("rope_type") or fields.data.get("type") or "default") == "default":
        fields.only("factor", 1, 1.0)
        return None
    # V4 multiplies neither cos/sin nor the softmax scale by YaRN's magnitude.
    fields.only("attention_factor", 1, 1.0)
    fields.only("truncate", True)
    return YarnScaling(
        factor=fields.number("factor"),
        original_max_position_embeddings=fields.integer("original_max_position_embeddings"),
        beta_fast=fields.number("beta_fast", default=32.0),
        beta_slow=fields.number("beta_slow", default=1.0),
    )


def _parse_rope(fields: ConfigFields) -> tuple[float, float, YarnScaling | None]:
    """(base of the window layers, base of the compressed layers, YaRN of the compressed layers)."""
    parameters = fields.nested("rope_parameters")
    scaling = fields.nested("rope_scaling")
    if parameters is None:
        yarn = None if scaling is None else _parse_yarn(scaling)
        return fields.number("rope_theta"), fields.number("compress_rope_theta"), yarn
    main, compress = parameters.nested("main"), parameters.nested("compress")
    if main is None or compress is None:
        raise fields.error("`rope_parameters` must have `main` and `compress`")
    main.only("rope_type", "default")
    main.only("type", "default")
    for key in ("factor", "attention_factor"):
        main.only(key, 1, 1.0)
    bases = []
    for part, key in ((main, "rope_theta"), (compress, "compress_rope_theta")):
        bases.append(part.number("rope_theta"))
        if fields.has(key):
            fields.agree(f"{part.prefix}rope_theta", bases[-1], key, fields.number(key))
    yarn = _parse_yarn(compress)
    if scaling is not None:
        fields.agree("rope_parameters.compress", yarn, "rope_scaling", _parse_yarn(scaling))
    return bases[0], bases[1], yarn


def _parse_draft(fields: ConfigFields, count: int) -> DraftModule | None:
    announced = fields.integer("num_nextn_predict_layers", minimum=0, default=0)
    if any(key.startswith("dspark_") and fields.has(key) for key in fields.data):
        # DSpark configs announce one MTP layer; the surplus zero ratios count the stages.
        surplus = fields.integers("compress_ratios", 0)[count:] if fields.has("compress_ratios") else []
        stages = 0
        while stages < len(surplus) and surplus[-1 - stages] == 0:
            stages += 1
        return DraftModule("dspark", stages or max(announced, 1))
    return DraftModule("mtp", announced) if announced else None


def parse_config(data: Mapping[str, object], where: str) -> ModelConfig:
    """A checked `ModelConfig`. `where` names the file in errors; raises CheckpointError."""
    fields = ConfigFields(data, where)
    model_type = check_architecture(fields)
    size = fields.integer
    count, head_dim, vocab_size = size("num_hidden_layers"), size("head_dim"), size("vocab_size")
    theta, compress_theta, yarn = _parse_rope(fields)
    for key, base in (("rope_theta", theta), ("compress_rope_theta", compress_theta)):
        if base <= 1:
            raise fields.error(f"`{key}` is {base}, expected more than 1: rotary frequencies are its negative powers")
    block, expert_dtype = parse_quantization(fields)
    bos = parse_token_ids(fields, "bos_token_id", vocab_size)
    if len(bos) > 1:
        raise fields.wrong("bos_token_id", "one id")
    config = ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=size("hidden_size"),
        num_hidden_layers=count,
        num_attention_heads=size("num_attention_heads"),
        head_dim=head_dim,
        rotary_dim=parse_rotary_dim(fields, head_dim),
        q_lora_rank=size("q_lora_rank"),
        o_groups=size("o_groups"),
        o_lora_rank=size("o_lora_rank"),
        n_routed_experts=size("n_routed_experts"),
        num_experts_per_tok=size("num_experts_per_tok"),
        moe_intermediate_size=size("moe_intermediate_size"),
        n_shared_experts=size("n_shared_experts"),
        sliding_window=size("sliding_window"),
        layers=_parse_layers(fields, count),
        index_n_heads=size("index_n_heads"),
        index_head_dim=size("index_head_dim"),
        index_topk=size("index_topk"),
        hc_mult=size("hc_mult"),
        hc_sinkhorn_iters=size("hc_sinkhorn_iters"),
        hc_eps=fields.number("hc_eps"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        swiglu_limit=fields.number("swiglu_limit"),
        rope_theta=theta,
        compress_rope_theta=compress_theta,
        yarn=yarn,
        max_position_embeddings=size("max_position_embeddings"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=parse_token_ids(fields, "eos_token_id", vocab_size),
        weight_block_size=block,
        expert_dtype=expert_dtype,
        draft=_parse_draft(fields, count),
    )
    _check_sizes(fields, config)
    return config


def _check_sizes(fields: ConfigFields, config: ModelConfig) -> None:
    if config.num_experts_per_tok > config.n_routed_experts:
        raise fields.wrong("num_experts_per_tok", f"at most `n_routed_experts` ({config.n_routed_experts})")
    # Every expert has names of its own, which are listed before a weight is looked at.
    if config.n_routed_experts * config.num_hidden_layers > _MAX_EXPERTS:
        raise fields.wrong("n_routed_experts", f"at most {_MAX_EXPERTS} in all {config.num_hidden_layers} layers")
    if config.hc_sinkhorn_iters > _MAX_SINKHORN_ITERS:
        raise fields.wrong("hc_sinkhorn_iters", f"at most {_MAX_SINKHORN_ITERS}")
    # State is divided into blocks that hold whole entries of every layer.
    block = math.lcm(*(max(layer.ratio, 1) for layer in config.layers))
    if block > _MAX_BLOCK:
        raise fields.error(
            f"the compress ratios of the layers have a common multiple of {block}, expected at most {_MAX_BLOCK}"
        )
    if config.num_attention_heads % config.o_groups:
        raise fields.wrong("o_groups", f"a divisor of `num_attention_heads` ({config.num_attention_heads})")
    if config.index_head_dim < config.rotary_dim:
        raise fields.wrong("index_head_dim", f"at least the rotary part of a head ({config.rotary_dim})")
    # The indexer rotates by a Hadamard matrix, which exists here for powers of two.
    if config.index_head_dim & (config.index_head_dim - 1):
        raise fields.wrong("index_head_dim", "a power of two")


def read_config(folder: Path) -> ModelConfig:
    """`config.json` of a checkpoint folder; `eos_token_id` of `generation_config.json` wins where present.

    Raises CheckpointError when the folder or the file is missing, or the config is not one that dsv4c compiles.
    """
    if not folder.exists():
        raise CheckpointError(
            f"{folder} does not exist", hint="give the folder with config.json and the safetensors files"
        )
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, expected a checkpoint folder", hint="name the folder that holds it")
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json", hint="name the folder of a Hugging Face checkpoint")
    config = parse_config(read_json(path), str(path))
    generation_path = folder / "generation_config.json"
    if not generation_path.is_file():
        return config
    generation = ConfigFields(read_json(generation_path), str(generation_path))
    eos_token_ids = parse_token_ids(generation, "eos_token_id", config.vocab_size)
    return replace(config, eos_token_ids=eos_token_ids) if eos_token_ids else config
