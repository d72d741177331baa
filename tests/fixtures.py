"""Seeded random models for the whole test suite: configs, weights, checkpoints on disk, the transformers model.

Nothing about a random model is trivial: a parity test on the stock initialiser, which leaves sinks, position biases,
mHC bases and hash tables at zero, misses most mistakes.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv4c.checkpoint.checkpoint import expected_weights, open_checkpoint
from dsv4c.checkpoint.config import LayerKind, ModelConfig, parse_config
from dsv4c.checkpoint.formats import quantize_fp4, quantize_fp8
from dsv4c.checkpoint.names import Naming, scale_name, stored_name

Quantization = Literal["none", "bf16", "fp8", "fp8_fp4"]
DATA = Path(__file__).parent / "data"
TINY_OFFICIAL = DATA / "tiny-v4-official"

_COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 0,
    "scoring_func": "sqrtsoftplus",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
# Sizes that are no multiple of any tile, block or group, in official keys.
ODD_CONFIGS: dict[str, dict[str, Any]] = {
    # Partial FP8 blocks everywhere, an odd vocabulary, a clamp that bites, layers in another order.
    "partial_blocks": _COMMON
    | {
        "vocab_size": 301,
        "hidden_size": 192,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "head_dim": 96,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 160,
        "o_groups": 3,
        "o_lora_rank": 48,
        "n_routed_experts": 10,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "num_hash_layers": 1,
        "sliding_window": 48,
        "compress_ratios": [24, 4, 0, 24, 4],
        "index_n_heads": 3,
        "index_head_dim": 64,
        "index_topk": 5,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 7,
        "hc_eps": 1e-5,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "swiglu_limit": 0.75,
        "rope_theta": 5000,
        "compress_rope_theta": 40000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 8,
            "original_max_position_embeddings": 64,
            "beta_fast": 16,
            "beta_slow": 1,
        },
    },
    # As small as it gets: two streams, one output group, heads narrower than a quantisation group, no YaRN.
    "narrow": _COMMON
    | {
        "vocab_size": 97,
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 40,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 48,
        "o_groups": 1,
        "o_lora_rank": 40,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "num_hash_layers": 1,
        "sliding_window": 20,
        "compress_ratios": [8, 4, 0],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 3,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 1.0,
        "swiglu_limit": 10.0,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
    },
}


def tiny_config_json(**overrides: Any) -> dict[str, Any]:
    """tests/data/tiny_config.json (official keys) with keys replaced; a key set to None is removed."""
    config: dict[str, Any] = json.loads((DATA / "tiny_config.json").read_text()) | overrides
    return {key: value for key, value in config.items() if value is not None}


def config_of(config_json: Mapping[str, Any]) -> ModelConfig:
    """The parsed form of a config dict."""
    return parse_config(config_json, "config.json")


def transformers_dialect(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The same model in the keys of transformers, which maps no HCA ratio but 128 from the official ones."""
    config = config_of(config_json)
    names = {
        LayerKind.WINDOW: "sliding_attention",
        LayerKind.CSA: "compressed_sparse_attention",
        LayerKind.HCA: "heavily_compressed_attention",
    }
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    rates |= {names[layer.kind]: layer.ratio for layer in config.layers if layer.ratio}
    partial = config.rotary_dim / config.head_dim
    compress: dict[str, Any] = {"rope_type": "default", "rope_theta": config.compress_rope_theta}
    if config.yarn is not None:
        compress |= {"rope_type": "yarn", "attention_factor": 1.0} | vars(config.yarn)
    official = {"compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling", "topk_method"}
    return {key: value for key, value in config_json.items() if key not in official} | {
        "layer_types": [names[layer.kind] for layer in config.layers],
        "compress_rates": rates,
        "mlp_layer_types": ["hash_moe" if layer.hash_routed else "moe" for layer in config.layers],
        "partial_rotary_factor": partial,
        "rope_theta": config.rope_theta,
        "compress_rope_theta": config.compress_rope_theta,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": partial},
            "compress": compress | {"partial_rotary_factor": partial},
        },
    }


def _random_weight(name: str, shape: tuple[int, ...], experts: int, rng: torch.Generator) -> Tensor:
    if name.endswith(".tid2eid"):
        return torch.rand(shape[0], experts, generator=rng).argsort(dim=1)[:, : shape[1]].contiguous()
    noise = torch.randn(shape, generator=rng)
    if name.endswith("norm.weight"):
        return 1.0 + 0.2 * noise
    if name.endswith("_scale"):
        return 0.7 + 0.2 * noise
    if name.endswith(".gate.bias"):
        # As large as the spread of the scores it corrects, so that selection and weights differ.
        return 0.3 * noise
    if name == "embed.weight" or len(shape) == 1 or name.endswith(".ape"):
        return noise * (1.0 if name == "embed.weight" else 0.5)
    return noise / math.sqrt(shape[1])


def random_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Official name -> float32 tensor (`tid2eid`: int64, distinct experts in a row); logits of about unit spread."""
    rng = torch.Generator().manual_seed(seed)
    return {
        name: _random_weight(name, shape, config.n_routed_experts, rng)
        for name, shape in expected_weights(config).items()
    }


def _is_full_precision(name: str) -> bool:
    """What the released checkpoints keep in fp32."""
    return "hc_" in name or name.endswith(("attn_sink", ".ape", ".gate.bias"))


def _is_dense(name: str) -> bool:
    leaves = ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "indexer.wq_b")
    stem = name.removesuffix(".weight")
    return stem.endswith(leaves) or ".shared_experts." in name


def _encode(
    weights: Mapping[str, Tensor],
    quantization: Quantization,
    block: tuple[int, int],
    dtype: torch.dtype,
    scale_dtype: Literal["ue8m0", "float32"],
) -> dict[str, Tensor]:
    """Official names, scales included -> tensors as they go to the file."""

    def scales(codes: Tensor) -> Tensor:
        if scale_dtype == "ue8m0":
            return codes.view(torch.float8_e8m0fnu)
        return torch.pow(2.0, codes.float() - 127)

    encoded: dict[str, Tensor] = {}
    for name, values in weights.items():
        expert = ".ffn.experts." in name
        if expert and quantization == "fp8_fp4":
            packed, exponents = quantize_fp4(values)
            encoded[name], encoded[scale_name(name)] = packed.view(torch.int8), scales(exponents)
        elif quantization in ("fp8", "fp8_fp4") and (expert or _is_dense(name)):
            codes, exponents = quantize_fp8(values, block)
            encoded[name], encoded[scale_name(name)] = codes, scales(exponents)
        elif values.dtype == torch.int64 or _is_full_precision(name):
            encoded[name] = values
        else:
            encoded[name] = values.to(dtype)
    return encoded


def _stack_experts(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The routed experts as transformers stacks them: w1 rows, then w3 rows, of every expert."""
    stacked: dict[str, Tensor] = {}
    for index in range(config.num_hidden_layers):
        prefix = f"layers.{index}.ffn.experts"
        for leaf, suffix in (("weight", ""), ("scale", "_scale_inv")):
            if f"{prefix}.0.w1.{leaf}" not in tensors:
                continue
            pairs = [
                torch.cat([tensors[f"{prefix}.{expert}.w1.{leaf}"], tensors[f"{prefix}.{expert}.w3.{leaf}"]])
                for expert in range(config.n_routed_experts)
            ]
            downs = [tensors[f"{prefix}.{expert}.w2.{leaf}"] for expert in range(config.n_routed_experts)]
            stacked[f"model.layers.{index}.mlp.experts.gate_up_proj{suffix}"] = torch.stack(pairs)
            stacked[f"model.layers.{index}.mlp.experts.down_proj{suffix}"] = torch.stack(downs)
    return stacked


def rename(tensors: Mapping[str, Tensor], config: ModelConfig, naming: Naming) -> dict[str, Tensor]:
    """Official names -> the names of another naming; draft modules (`mtp.*`) have one naming only."""
    renamed = {
        name if name.startswith("mtp.") else stored_name(name, naming): tensor for name, tensor in tensors.items()
    }
    result = {name: tensor for name, tensor in renamed.items() if name is not None}
    return result | _stack_experts(tensors, config) if naming == "transformers" else result


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], shards: int = 1) -> None:
    """One `model.safetensors`, or `shards` of them with an index."""
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_checkpoint(
    folder: Path,
    config_json: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    *,
    naming: Naming = "official",
    quantization: Quantization = "none",
    shards: int = 2,
    dtype: Literal["float32", "bfloat16"] = "float32",
    scale_dtype: Literal["ue8m0", "float32"] = "ue8m0",
) -> Path:
    """Writes a checkpoint folder and returns it.

    quantization: "none" stores `dtype`; "bf16" is "none" with bfloat16; "fp8" makes dense weights and experts FP8;
    "fp8_fp4" is the released form (FP8 dense, FP4 experts). What is not quantised has `dtype`; mHC, sinks, position
    biases and router biases are always fp32. `read_weights` gives the values as rounded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(config_json)
    stored_dtype = torch.bfloat16 if dtype == "bfloat16" or quantization == "bf16" else torch.float32
    tensors = _encode(weights, quantization, config.weight_block_size, stored_dtype, scale_dtype)
    written = dict(config_json)
    if quantization in ("fp8", "fp8_fp4"):
        quantized = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(config.weight_block_size),
        }
        written.setdefault("quantization_config", quantized)
    if quantization == "fp8_fp4":
        written["expert_dtype"] = "fp4"
    (folder / "config.json").write_text(json.dumps(written, indent=1))
    write_tensors(folder, rename(tensors, config, naming), shards)
    return folder


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Official name -> the float32 (or int64) values that a checkpoint holds, dequantised."""
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.values(name) for name in checkpoint.weights}


def transformers_model(config_json: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
    """DeepseekV4ForCausalLM with these weights: fp32, eager attention and experts, in eval mode."""
    # Only the parity tests pay for this import.
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    keys = transformers_dialect({key: value for key, value in config_json.items() if key != "quantization_config"})
    config = DeepseekV4Config(**{key: value for key, value in keys.items() if key != "dtype"})
    build: Any = DeepseekV4ForCausalLM._from_config
    model = build(config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32)
    state = rename(weights, config_of(config_json), "transformers")
    # Buffers such as rotary frequencies are not part of a checkpoint; every parameter must be.
    loaded = model.load_state_dict(state, strict=False)
    missing = [name for name in loaded.missing_keys if not name.endswith("inv_freq")]
    assert not missing and not loaded.unexpected_keys, (missing, loaded.unexpected_keys)
    return model.float().eval()
