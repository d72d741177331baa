"""Full-size checkpoints without weights: true headers, and files of the right length that take no disk.

A file is extended by `truncate`, so that its data is a hole; reading it gives zeros. The configs are those of the
released models (spec section 1), the shapes and dtypes those of their tensors (section 4.1).
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dsv4c.checkpoint.checkpoint import WeightInfo
from dsv4c.checkpoint.config import ModelConfig
from dsv4c.checkpoint.names import Naming, stored_name
from dsv4c.planning.source import open_source
from tests.fixtures import config_of

_COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "bos_token_id": 0,
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "max_position_embeddings": 1048576,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "rope_theta": 10000,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
_FLASH = _COMMON | {
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.5,
    "index_topk": 512,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}
_PRO = _COMMON | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
    "index_topk": 1024,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}


def _dspark(config: Mapping[str, Any], rank: int) -> dict[str, Any]:
    last = config["num_hidden_layers"] - 3
    return {
        **config,
        "compress_ratios": [*config["compress_ratios"], 0, 0],
        "dspark_block_size": 5,
        "dspark_markov_rank": rank,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [last, last + 1, last + 2],
    }


RELEASED: dict[str, dict[str, Any]] = {
    "flash": _FLASH,
    "flash-0731": _dspark(_FLASH, 256),
    "pro": _PRO,
    "pro-0813": _dspark(_PRO, 512),
}


def write_config(folder: Path, config_json: Mapping[str, Any]) -> Path:
    """A folder with only config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json, indent=1))
    return folder


def write_header_only(
    folder: Path, config_json: Mapping[str, Any], naming: Naming = "official", shards: int = 4
) -> Path:
    """The checkpoint of `config_json` as released, in sparse shards with an index."""
    write_config(folder, config_json)
    source = open_source(folder / "config.json")
    tensors = list(_stored(source.weights.values(), config_of(config_json), naming))
    tensors += list(_stored(source.draft_weights.values(), config_of(config_json), "official"))
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = tensors[shard * len(tensors) // shards : (shard + 1) * len(tensors) // shards]
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        _write_shard(folder / name, part)
        weight_map |= dict.fromkeys((tensor[0] for tensor in part), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


_Tensor = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, bytes


def _stored(weights: Iterable[WeightInfo], config: ModelConfig, naming: Naming) -> Iterable[_Tensor]:
    stacks: dict[str, _Tensor] = {}
    for info in weights:
        parts = [(info.stored, info.name)]
        if info.scales is not None:
            parts.append((info.scales, info.scales.name))
        for stored, name in parts:
            renamed = name if name.startswith("mtp.") else stored_name(name, naming)
            if renamed is not None:
                yield renamed, stored.dtype, stored.shape, stored.size_bytes
                continue
            # transformers stacks the experts: w1 rows, then w3 rows.
            layer, leaf = name.split(".")[1], name.split(".")[5:]
            stem = "down_proj" if leaf[0] == "w2" else "gate_up_proj"
            suffix = "_scale_inv" if leaf[1] == "scale" else ""
            rows = stored.shape[0] * (1 if leaf[0] == "w2" else 2)
            shape = (config.n_routed_experts, rows, stored.shape[1])
            path = f"model.layers.{layer}.mlp.experts.{stem}{suffix}"
            size = stored.size_bytes // math.prod(stored.shape) * math.prod(shape)
            stacks[path] = (path, stored.dtype, shape, size)
    yield from stacks.values()


def _write_shard(path: Path, tensors: list[_Tensor]) -> None:
    header: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    data = json.dumps(header, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        file.truncate(8 + len(data) + offset)
