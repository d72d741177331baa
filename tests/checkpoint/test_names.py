"""The three namings, checked against transformers' own loader and against the released tensor counts."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4c.checkpoint.checkpoint import Checkpoint, expected_weights, open_checkpoint
from dsv4c.checkpoint.config import LayerKind, parse_config
from dsv4c.checkpoint.formats import Encoding
from dsv4c.checkpoint.names import detect_naming, official_name, scale_name, stored_name
from dsv4c.checkpoint.shapes import dspark_shapes, mtp_shapes
from dsv4c.errors import CheckpointError
from tests.fixtures import (
    ODD_CONFIGS,
    TINY_OFFICIAL,
    Quantization,
    config_of,
    random_weights,
    tiny_config_json,
    transformers_dialect,
    write_checkpoint,
)

NARROW = ODD_CONFIGS["narrow"]
FLASH = tiny_config_json(
    vocab_size=129280, hidden_size=4096, num_hidden_layers=43, num_attention_heads=64, head_dim=512, q_lora_rank=1024,
    o_groups=8, o_lora_rank=1024, n_routed_experts=256, num_experts_per_tok=6, moe_intermediate_size=2048,
    num_hash_layers=3, index_n_heads=64, compress_ratios=[0, 0, *[4, 128] * 20, 4, 0],
)  # fmt: skip
PRO = FLASH | {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16,
    "n_routed_experts": 384, "moe_intermediate_size": 3072, "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}  # fmt: skip


def released_tensors(shapes: dict[str, tuple[int, ...]]) -> tuple[int, int]:
    """(tensors, payload bytes) of the released form: FP8 dense, FP4 experts, both with scales."""
    full = (".attn_sink", ".ape", ".gate.bias")
    dense = ("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "e_proj", "h_proj", "main_proj")
    count = size = 0
    for name, shape in shapes.items():
        elements, stem = torch.Size(shape).numel(), name.removesuffix(".weight")
        count += 1
        if ".ffn.experts." in name:
            count += 1
            size += elements // 2 + elements // 32
        elif stem.endswith(dense) or ".shared_experts." in name:
            count += 1
            size += elements + -(-shape[0] // 128) * -(-shape[1] // 128)
        elif name.endswith(".tid2eid"):
            size += elements * 8
        else:
            size += elements * (4 if "hc_" in name or name.endswith(full) else 2)
    return count, size


@pytest.mark.parametrize(
    ("config_json", "rank", "layers", "mtp", "dspark"),
    [
        (FLASH, 256, [2, 21, 20], (69_187, 159_609_485_896), (72_317, 166_878_536_440)),
        (PRO, 512, [0, 30, 31], (145_116, 864_704_792_696), (149_782, 892_727_580_904)),
    ],
)
def test_released_models(
    config_json: dict[str, Any], rank: int, layers: list[int], mtp: tuple[int, int], dspark: tuple[int, int]
) -> None:
    config = parse_config(config_json, "config.json")
    main = expected_weights(config)
    assert released_tensors(main | mtp_shapes(config, 1)) == mtp
    assert released_tensors(main | dspark_shapes(config, 3, 3, rank)) == dspark
    kinds = Counter(layer.kind for layer in config.layers)
    assert [kinds[kind] for kind in (LayerKind.WINDOW, LayerKind.CSA, LayerKind.HCA)] == layers


@pytest.mark.parametrize("naming", ["official", "save_pretrained", "transformers"])
def test_names_round_trip(naming: Any) -> None:
    for name in expected_weights(config_of(tiny_config_json())):
        for official in (name, scale_name(name)):
            stored = stored_name(official, naming)
            if stored is not None:
                assert official_name(stored, naming) == official
            elif official.endswith(".weight"):
                # Routed experts are stacked there.
                assert naming == "transformers" and ".ffn.experts." in official


@pytest.mark.parametrize(
    ("stored", "naming", "official"),
    [
        ("model.layers.3.attn.norm.weight", "save_pretrained", "layers.3.attn.kv_norm.weight"),
        ("model.layers.3.attn.compressor.norm.weight", "save_pretrained", "layers.3.attn.compressor.norm.weight"),
        ("model.norm.weight", "save_pretrained", "norm.weight"),
        ("model.layers.3.attn.kv_norm.weight", "save_pretrained", None),
        ("model.layers.3.self_attn.kv_norm.weight", "transformers", "layers.3.attn.kv_norm.weight"),
        ("model.layers.3.self_attn.compressor.kv_norm.weight", "transformers", "layers.3.attn.compressor.norm.weight"),
        (
            "model.layers.3.self_attn.compressor.indexer.kv_norm.weight",
            "transformers",
            "layers.3.attn.indexer.compressor.norm.weight",
        ),
        ("model.layers.3.self_attn.q_b_proj.weight_scale_inv", "transformers", "layers.3.attn.wq_b.scale"),
        ("layers.3.attn.wq_b.scale", "official", "layers.3.attn.wq_b.scale"),
        ("layers.03.attn.wq_b.weight", "official", None),
        ("layers.x.attn.wq_b.weight", "official", None),
        ("layers.3.attn.wq_b.weight.extra", "official", None),
        ("lm_head.weight", "transformers", "head.weight"),
        ("head.weight", "save_pretrained", "head.weight"),
    ],
)
def test_names_that_share_stems(stored: str, naming: Any, official: str | None) -> None:
    assert official_name(stored, naming) == official


def test_detection() -> None:
    assert detect_naming(["layers.0.attn.wq_a.weight"]) == "official"
    assert detect_naming(["head.weight", "model.layers.0.attn.wq_a.weight"]) == "save_pretrained"
    assert detect_naming(["model.norm.weight", "model.layers.0.input_layernorm.weight"]) == "transformers"
    assert detect_naming(["lm_head.weight"]) == "transformers"


def codes_of(checkpoint: Checkpoint) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    return {name: (checkpoint.codes(name), checkpoint.scales(name)) for name in checkpoint.weights}


@pytest.mark.parametrize("quantization", ["none", "bf16", "fp8_fp4"])
@pytest.mark.parametrize("config_json", ODD_CONFIGS.values(), ids=ODD_CONFIGS.keys())
def test_three_namings_are_one_checkpoint(
    tmp_path: Path, config_json: dict[str, Any], quantization: Quantization
) -> None:
    weights = random_weights(config_of(config_json), seed=0)
    official = open_checkpoint(write_checkpoint(tmp_path / "a", config_json, weights, quantization=quantization))
    assert (official.naming, official.warnings) == ("official", [])
    for naming in ("save_pretrained", "transformers"):
        other = open_checkpoint(
            write_checkpoint(
                tmp_path / naming, transformers_dialect(config_json), weights, naming=naming, quantization=quantization
            )
        )
        assert (other.naming, other.warnings, other.config) == (naming, [], official.config)
        for name, (codes, scales) in codes_of(official).items():
            info = other.weights[name]
            assert info.encoding is official.weights[name].encoding and info.block == official.weights[name].block
            assert torch.equal(other.codes(name).view(torch.uint8), codes.view(torch.uint8)), name
            other_scales = other.scales(name)
            assert (other_scales is None) == (scales is None)
            assert scales is None or (other_scales is not None and torch.equal(other_scales, scales))
            if quantization == "none":
                assert torch.equal(other.values(name), weights[name]), name


def test_stacked_fp8_experts(tmp_path: Path) -> None:
    """Halves of whole blocks are split; a block across both halves is refused."""
    config_json = NARROW | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}
    weights = random_weights(config_of(config_json), seed=0)
    written = [
        open_checkpoint(write_checkpoint(tmp_path / naming, config_json, weights, naming=naming, quantization="fp8"))
        for naming in ("official", "transformers")
    ]
    for name, info in written[0].weights.items():
        assert torch.equal(written[0].values(name), written[1].values(name)), name
        assert ".ffn.experts." not in name or (info.encoding, info.block) == (Encoding.FP8_BLOCK, (32, 32))
    with pytest.raises(
        CheckpointError, match="has scale blocks of 128 rows, but the two halves it stacks have 64 rows"
    ):
        open_checkpoint(write_checkpoint(tmp_path / "c", NARROW, weights, naming="transformers", quantization="fp8"))


def test_two_names_of_one_tensor(tmp_path: Path) -> None:
    weights = random_weights(config_of(NARROW), seed=0)
    folder = write_checkpoint(tmp_path, NARROW, weights, quantization="fp8", shards=1)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["layers.0.attn.wq_a.weight_scale_inv"] = header.pop("layers.1.attn.wq_a.scale")
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(CheckpointError, match=r"are the same tensor \(layers\.0\.attn\.wq_a\.scale\)"):
        open_checkpoint(folder)


def as_official(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The part of a transformers state dict that is one official tensor."""
    stored = stored_name(name, "transformers")
    if stored is not None:
        return state[stored]
    _, layer, _, _, expert, projection, _ = name.split(".")
    leaf = "down_proj" if projection == "w2" else "gate_up_proj"
    tensor = state[f"model.layers.{layer}.mlp.experts.{leaf}"][int(expert)]
    half = tensor.shape[0] // 2
    return {"w1": tensor[:half], "w3": tensor[half:], "w2": tensor}[projection]


def test_transformers_reads_and_writes_the_same(tmp_path: Path) -> None:
    """Its loader on the official names, then what its save_pretrained writes."""
    transformers = pytest.importorskip("transformers")
    weights = random_weights(config_of(NARROW), seed=0)
    folder = write_checkpoint(tmp_path / "official", transformers_dialect(NARROW), weights)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    state = model.state_dict()
    for name, values in weights.items():
        assert torch.equal(as_official(state, name), values), name
    model.save_pretrained(tmp_path / "saved", max_shard_size="1MB")
    saved = open_checkpoint(tmp_path / "saved")
    assert saved.naming == "save_pretrained" and len(saved.shard_paths) > 1
    assert replace(saved.config, draft=None) == config_of(NARROW)
    for name, values in weights.items():
        assert torch.equal(saved.values(name), values), name


def test_values_equal_what_transformers_loads() -> None:
    """transformers' own renaming and dequantisation of the released form, to bf16."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers dequantises FP8 checkpoints only with accelerate")
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_OFFICIAL, dtype=torch.bfloat16)
    state = model.state_dict()
    checkpoint = open_checkpoint(TINY_OFFICIAL)
    for name, info in checkpoint.weights.items():
        values, loaded = checkpoint.values(name), as_official(state, name)
        assert tuple(loaded.shape) == info.shape
        assert torch.equal(loaded.to(values.dtype), values), name
