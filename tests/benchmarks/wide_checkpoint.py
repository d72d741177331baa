"""A synthetic checkpoint too big for any cache: the V4 architecture, wide, a few layers, every expert used by every
token, so that a decode step reads about every byte of the weights.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.fixtures import config_of, expected_weights, tiny_config_json

# 20 M parameters a layer, nearly all of them in the experts.
WIDE: dict[str, Any] = {
    "hidden_size": 2048,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 8,
    "num_hash_layers": 0,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 16,
    "o_groups": 4,
    "o_lora_rank": 256,
    "q_lora_rank": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
}


def _is_float32(name: str) -> bool:
    return "hc_" in name or name.endswith(("attn_sink", ".ape", ".gate.bias"))


def write_wide_checkpoint(folder: Path, layers: int) -> Path:
    """Writes a bf16 checkpoint, a shard a layer; matrices are cut from one pool of noise, which costs no time."""
    folder.mkdir(parents=True)
    config_json = tiny_config_json(**WIDE, num_hidden_layers=layers, compress_ratios=[0] * layers)
    shapes = expected_weights(config_of(config_json))
    largest = max(math.prod(shape) for shape in shapes.values())
    pool = torch.randn(largest, generator=torch.Generator().manual_seed(0))

    def values(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16)
        scaled = pool[: math.prod(shape)].view(shape) * (shape[-1] ** -0.5)
        return scaled if _is_float32(name) else scaled.bfloat16()

    shards: dict[str, list[str]] = {}
    for name in shapes:
        shards.setdefault(name.split(".")[1] if name.startswith("layers.") else "ends", []).append(name)
    weight_map = {}
    for shard, names in shards.items():
        file_name = f"model-{shard}.safetensors"
        save_file({name: values(name, shapes[name]).contiguous() for name in names}, folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    (folder / "config.json").write_text(json.dumps(config_json, indent=1))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
