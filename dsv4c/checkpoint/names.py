"""The three namings of a checkpoint's tensors -> the official names, which dsv4c uses inside.

One table of whole paths, `#` standing for a layer or expert number: several names share stems (`norm`, `wq_b`) and
transformers swaps the nesting of `indexer.compressor`, so renames on parts of a path go wrong.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dsv4c.checkpoint.config import ModelConfig
from dsv4c.checkpoint.safetensors import StoredTensor
from dsv4c.errors import CheckpointError

Naming = Literal["official", "save_pretrained", "transformers"]
DRAFT_PREFIX = "mtp."

# official, save_pretrained (below `model.`), transformers (below `model.`); a leading `/` means no `model.`.
_TOP = """
embed.weight                         embed_tokens.weight   embed_tokens.weight
head.weight                          /head.weight          /lm_head.weight
norm.weight                          norm.weight           norm.weight
hc_head_fn                           hc_head.hc_fn         hc_head.hc_fn
hc_head_base                         hc_head.hc_base       hc_head.hc_base
hc_head_scale                        hc_head.hc_scale      hc_head.hc_scale
"""
# The same below `layers.#.`; `=` means as in the official naming.
_LAYER = """
attn_norm.weight                     =                     input_layernorm.weight
ffn_norm.weight                      =                     post_attention_layernorm.weight
hc_attn_fn                           =                     attn_hc.fn
hc_attn_base                         =                     attn_hc.base
hc_attn_scale                        =                     attn_hc.scale
hc_ffn_fn                            =                     ffn_hc.fn
hc_ffn_base                          =                     ffn_hc.base
hc_ffn_scale                         =                     ffn_hc.scale
attn.attn_sink                       =                     self_attn.sinks
attn.wq_a.weight                     =                     self_attn.q_a_proj.weight
attn.q_norm.weight                   =                     self_attn.q_a_norm.weight
attn.wq_b.weight                     =                     self_attn.q_b_proj.weight
attn.wkv.weight                      =                     self_attn.kv_proj.weight
attn.kv_norm.weight                  attn.norm.weight      self_attn.kv_norm.weight
attn.wo_a.weight                     =                     self_attn.o_a_proj.weight
attn.wo_b.weight                     =                     self_attn.o_b_proj.weight
attn.compressor.ape                  =                     self_attn.compressor.position_bias
attn.compressor.wkv.weight           =                     self_attn.compressor.kv_proj.weight
attn.compressor.wgate.weight         =                     self_attn.compressor.gate_proj.weight
attn.compressor.norm.weight          =                     self_attn.compressor.kv_norm.weight
attn.indexer.wq_b.weight             =                     self_attn.compressor.indexer.q_b_proj.weight
attn.indexer.weights_proj.weight     =                     self_attn.compressor.indexer.scorer.weights_proj.weight
attn.indexer.compressor.ape          =                     self_attn.compressor.indexer.position_bias
attn.indexer.compressor.wkv.weight   =                     self_attn.compressor.indexer.kv_proj.weight
attn.indexer.compressor.wgate.weight =                     self_attn.compressor.indexer.gate_proj.weight
attn.indexer.compressor.norm.weight  =                     self_attn.compressor.indexer.kv_norm.weight
ffn.gate.weight                      =                     mlp.gate.weight
ffn.gate.bias                        =                     mlp.gate.e_score_correction_bias
ffn.gate.tid2eid                     =                     mlp.gate.tid2eid
ffn.shared_experts.w1.weight         =                     mlp.shared_experts.gate_proj.weight
ffn.shared_experts.w3.weight         =                     mlp.shared_experts.up_proj.weight
ffn.shared_experts.w2.weight         =                     mlp.shared_experts.down_proj.weight
ffn.experts.#.w1.weight              =                     -
ffn.experts.#.w3.weight              =                     -
ffn.experts.#.w2.weight              =                     -
"""
# Leaves of stacked experts -> the projections in each, in row order.
_STACKED: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("w1.weight", "w3.weight"),
    "gate_up_proj_scale_inv": ("w1.scale", "w3.scale"),
    "down_proj": ("w2.weight",),
    "down_proj_scale_inv": ("w2.scale",),
}
# What a layer consists of in transformers; no other naming has these.
_MODULES = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "attn_hc", "ffn_hc"}
_NUMBER = re.compile(r"0|[1-9][0-9]*")
_STACKED_NAME = re.compile(r"model\.layers\.(0|[1-9][0-9]*)\.mlp\.experts\.(\w+)")


def scale_name(weight: str) -> str:
    """The official name of a quantised weight's scales."""
    return f"{weight.removesuffix('.weight')}.scale"


def _build_tables() -> dict[str, dict[str, str]]:
    """Naming -> {official template: stored template}."""
    tables: dict[str, dict[str, str]] = {"official": {}, "save_pretrained": {}, "transformers": {}}
    for text, prefix in ((_TOP, ""), (_LAYER, "layers.#.")):
        for line in text.split("\n"):
            if not line:
                continue
            official, saved, module = line.split()
            tables["official"][prefix + official] = prefix + official
            for naming, name in (("save_pretrained", saved), ("transformers", module)):
                name = official if name == "=" else name
                if name == "-":
                    continue
                stored = name[1:] if name.startswith("/") else f"model.{prefix}{name}"
                tables[naming][prefix + official] = stored
    return tables


_TABLES = _build_tables()
_INVERSE = {naming: {stored: official for official, stored in table.items()} for naming, table in _TABLES.items()}


def _split_numbers(name: str) -> tuple[str, list[str]]:
    segments = name.split(".")
    numbers = [segment for segment in segments if _NUMBER.fullmatch(segment)]
    return ".".join("#" if _NUMBER.fullmatch(segment) else segment for segment in segments), numbers


def _fill(template: str, numbers: list[str]) -> str:
    values = iter(numbers)
    return ".".join(next(values) if segment == "#" else segment for segment in template.split("."))


def _rename(name: str, table: Mapping[str, str]) -> str | None:
    template, numbers = _split_numbers(name)
    renamed = table.get(template)
    return None if renamed is None else _fill(renamed, numbers)


def official_name(name: str, naming: Naming) -> str | None:
    """The official name of a stored tensor or scale; None when the naming has no such name (stacked experts too)."""
    for suffix in (".weight_scale_inv", ".scale"):
        if name.endswith(suffix):
            weight = _rename(f"{name.removesuffix(suffix)}.weight", _INVERSE[naming])
            if weight is not None:
                return scale_name(weight)
    return _rename(name, _INVERSE[naming])


def stored_name(official: str, naming: Naming) -> str | None:
    """The name of an official weight or scale in a naming; None for routed experts, which transformers stacks."""
    stored = _rename(official, _TABLES[naming])
    if stored is not None or not official.endswith(".scale"):
        return stored
    stored = _rename(f"{official.removesuffix('.scale')}.weight", _TABLES[naming])
    if stored is None:
        return None
    return scale_name(stored) if naming == "official" else f"{stored}_scale_inv"


def detect_naming(names: Iterable[str]) -> Naming:
    """Which naming a checkpoint uses, by its layers (its heads, where it has none)."""
    naming: Naming = "official"
    for name in names:
        if name.startswith("model.layers."):
            segment = name.split(".")[3:4]
            return "transformers" if segment and segment[0] in _MODULES else "save_pretrained"
        if name == "lm_head.weight":
            naming = "transformers"
        elif name.startswith("model.") and naming == "official":
            naming = "save_pretrained"
    return naming


def _split_stacked(tensor: StoredTensor, config: ModelConfig) -> dict[str, StoredTensor] | None:
    """Each expert's part of a stacked tensor, as an extent of the same shard; None for other tensors."""
    match = _STACKED_NAME.fullmatch(tensor.name)
    if match is None or match[2] not in _STACKED:
        return None
    layer, parts = match[1], _STACKED[match[2]]
    experts = config.n_routed_experts
    # A block of scales that spans the last rows of w1 and the first of w3 belongs to neither.
    if (
        match[2] == "gate_up_proj_scale_inv"
        and tensor.shape[1:2] != (2 * config.moe_intermediate_size,)
        and config.moe_intermediate_size % config.weight_block_size[0]
    ):
        raise CheckpointError(
            f"{tensor.shard}: tensor `{tensor.name}` has scale blocks of {config.weight_block_size[0]} rows, but the "
            f"two halves it stacks have {config.moe_intermediate_size} rows each",
            hint="write the experts one by one, in the official naming",
        )
    if len(tensor.shape) != 3 or tensor.shape[0] != experts or tensor.shape[1] % len(parts):
        raise CheckpointError(
            f"{tensor.shard}: tensor `{tensor.name}` has shape {list(tensor.shape)}, "
            f"expected [{experts}, a multiple of {len(parts)} rows, columns]"
        )
    rows = tensor.shape[1] // len(parts)
    size_bytes = tensor.size_bytes // (experts * len(parts))
    pieces = {}
    for index in range(experts * len(parts)):
        expert, part = divmod(index, len(parts))
        pieces[f"layers.{layer}.ffn.experts.{expert}.{parts[part]}"] = replace(
            tensor,
            shape=(rows, tensor.shape[2]),
            offset=tensor.offset + index * size_bytes,
            size_bytes=size_bytes,
        )
    return pieces


@dataclass(frozen=True)
class NamedTensors:
    """Stored tensors under official names: `main`, `draft` (`mtp.*`), and the stored names that fit no rule."""

    naming: Naming
    main: dict[str, StoredTensor]
    draft: dict[str, StoredTensor]
    unknown: dict[str, StoredTensor]


def resolve_names(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> NamedTensors:
    """Official names for the tensors of a checkpoint; each keeps its stored name in `StoredTensor.name`.

    Raises CheckpointError when two tensors have one official name, or a stacked tensor does not split.
    """
    resolved = NamedTensors(detect_naming(tensors), {}, {}, {})
    for name, tensor in tensors.items():
        if name.startswith(DRAFT_PREFIX):
            suffix = ".weight_scale_inv"
            official = f"{name.removesuffix(suffix)}.scale" if name.endswith(suffix) else name
            pieces, target = {official: tensor}, resolved.draft
        else:
            renamed = official_name(name, resolved.naming)
            stacked = _split_stacked(tensor, config) if resolved.naming == "transformers" else None
            pieces = stacked or ({renamed: tensor} if renamed is not None else {name: tensor})
            target = resolved.main if stacked or renamed is not None else resolved.unknown
        for official, piece in pieces.items():
            if official in target:
                raise CheckpointError(
                    f"{piece.shard}: `{piece.name}` and `{target[official].name}` are the same tensor ({official})"
                )
            target[official] = piece
    return resolved
