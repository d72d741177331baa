"""config.json: both dialects, and a clear refusal of everything that V4 does not define."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4c.checkpoint.config import DraftModule, LayerKind, YarnScaling, parse_config, read_config
from dsv4c.errors import CheckpointError
from tests.fixtures import ODD_CONFIGS, TINY_OFFICIAL, tiny_config_json, transformers_dialect


def refusal(config_json: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as raised:
        parse_config(config_json, "x/config.json")
    assert raised.value.message.startswith("x/config.json: ")
    return raised.value.message


def test_official_keys() -> None:
    config = parse_config(tiny_config_json(), "config.json")
    assert [layer.kind.value for layer in config.layers] == ["window", "window", "csa", "hca", "csa", "hca"]
    assert [layer.ratio for layer in config.layers] == [0, 0, 4, 128, 4, 128]
    assert [layer.hash_routed for layer in config.layers] == [True, True, False, False, False, False]
    assert config.yarn == YarnScaling(16.0, 256, 32.0, 1.0)
    assert (config.rotary_dim, config.rope_theta, config.compress_rope_theta) == (64, 10000.0, 160000.0)
    assert config.draft == DraftModule("mtp", 1)
    assert (config.bos_token_id, config.eos_token_ids, config.weight_block_size) == (0, (1,), (128, 128))


@pytest.mark.parametrize("config_json", [tiny_config_json(), *ODD_CONFIGS.values()])
def test_both_dialects_say_the_same(config_json: dict[str, Any]) -> None:
    official = parse_config(config_json, "config.json")
    assert parse_config(transformers_dialect(config_json), "config.json") == official
    # Both at once, agreeing.
    assert parse_config(transformers_dialect(config_json) | config_json, "config.json") == official


def test_trained_model() -> None:
    config = read_config(TINY_OFFICIAL)
    assert config.yarn is None and config.draft is None and config.expert_dtype == "fp4"
    assert [layer.ratio for layer in config.layers] == [0, 4, 16, 4, 16, 4, 16, 0]


def test_ratio_kinds() -> None:
    config = parse_config(tiny_config_json(compress_ratios=[0, 4, 1, 2, 8, 128]), "config.json")
    assert [layer.kind for layer in config.layers] == [LayerKind.WINDOW, LayerKind.CSA, *[LayerKind.HCA] * 4]


def test_first_layers_of_a_model() -> None:
    """Only `num_hidden_layers` needs to change."""
    config = parse_config(tiny_config_json(num_hidden_layers=1), "config.json")
    assert [(layer.ratio, layer.hash_routed) for layer in config.layers] == [(0, True)]


def test_dspark_is_found_by_its_keys() -> None:
    config_json = tiny_config_json(compress_ratios=[0, 0, 4, 128, 4, 128, 0, 0, 0], dspark_block_size=5)
    assert parse_config(config_json, "config.json").draft == DraftModule("dspark", 3)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", None, "`hidden_size` is missing"),
        ("hidden_size", "256", "`hidden_size` is '256', expected an integer"),
        ("hidden_size", True, "`hidden_size` is True, expected an integer"),
        ("hidden_size", 256.0, "`hidden_size` is 256.0, expected an integer"),
        ("hidden_size", 0, "`hidden_size` is 0, expected at least 1"),
        ("vocab_size", -5, "`vocab_size` is -5, expected at least 1"),
        ("rms_norm_eps", True, "`rms_norm_eps` is True, expected a number"),
        ("rms_norm_eps", 0, "`rms_norm_eps` is 0, expected a finite number greater than 0"),
        ("swiglu_limit", float("nan"), "`swiglu_limit` is nan, expected a finite number"),
        ("rope_theta", 10**400, "expected a finite number"),
        ("routed_scaling_factor", 1e39, "expected a finite number"),
        ("max_position_embeddings", 2**31, "expected at most 2147483647"),
        ("sliding_window", 10**400, "`sliding_window` is 1000"),
        ("n_routed_experts", 10**9, "expected at most 262144 in all 6 layers"),
        ("hc_sinkhorn_iters", 65, "`hc_sinkhorn_iters` is 65, expected at most 64"),
        ("compress_ratios", [0, 4, 1021, 1031, 4, 8], "common multiple of 8421208, expected at most 1048576"),
        ("compress_ratios", [0] * 5 + [2**31], "expected a list of integers of at least 0, at most 2147483647"),
        ("model_type", "deepseek_v3", "`model_type` is 'deepseek_v3', expected 'deepseek_v4'"),
        ("model_type", 4, "`model_type` is 4, expected a string"),
        ("model_type", "deepseek_v41", "DeepseekV41ForCausalLM) is not supported yet"),
        ("architectures", ["DeepseekV41ForCausalLM"], "DeepseekV41ForCausalLM) is not supported yet"),
        ("architectures", ["LlamaForCausalLM"], "expected ['DeepseekV4ForCausalLM']"),
        ("num_experts_per_tok", 17, "`num_experts_per_tok` is 17, expected at most `n_routed_experts` (16)"),
        ("o_groups", 3, "`o_groups` is 3, expected a divisor of `num_attention_heads` (8)"),
        ("qk_rope_head_dim", 63, "the rotary part of a head is 63 channels, expected even and at most 128"),
        ("qk_rope_head_dim", 130, "the rotary part of a head is 130 channels, expected even and at most 128"),
        ("qk_rope_head_dim", None, "neither `qk_rope_head_dim` nor `partial_rotary_factor` is present"),
        ("index_head_dim", 96, "`index_head_dim` is 96, expected a power of two"),
        ("index_head_dim", 32, "`index_head_dim` is 32, expected at least the rotary part of a head (64)"),
        ("scoring_func", "softmax", "`scoring_func` is 'softmax'; DeepSeek-V4 defines 'sqrtsoftplus'"),
        ("topk_method", "greedy", "`topk_method` is 'greedy'; DeepSeek-V4 defines 'noaux_tc'"),
        ("tie_word_embeddings", True, "`tie_word_embeddings` is True; DeepSeek-V4 defines False"),
        ("n_shared_experts", 2, "`n_shared_experts` is 2; DeepSeek-V4 defines 1"),
        ("hidden_act", "gelu", "`hidden_act` is 'gelu'; DeepSeek-V4 defines 'silu'"),
        ("attention_bias", True, "`attention_bias` is True; DeepSeek-V4 defines False"),
        ("norm_topk_prob", False, "`norm_topk_prob` is False; DeepSeek-V4 defines True"),
        ("num_key_value_heads", 8, "`num_key_value_heads` is 8; DeepSeek-V4 defines 1"),
        ("num_key_value_heads", True, "`num_key_value_heads` is True; DeepSeek-V4 defines 1"),
        ("n_group", 8, "`n_group` is 8; DeepSeek-V4 defines 1"),
        ("vision_config", {"depth": 1}, "DeepSeek-V4 defines no such key"),
        ("num_hash_layers", None, "neither `num_hash_layers` nor `mlp_layer_types` is present"),
        ("num_hash_layers", -1, "`num_hash_layers` is -1, expected at least 0"),
        ("compress_ratios", None, "neither `compress_ratios` nor `layer_types` is present"),
        ("compress_ratios", [0, 4], "`compress_ratios` has 2 entries, `num_hidden_layers` is 6"),
        ("compress_ratios", [0, 0, 4, -1, 4, 8], "expected a list of integers of at least 0"),
        ("compress_ratios", [0, 0, 4, True, 4, 8], "expected a list of integers of at least 0"),
        ("compress_ratios", 4, "expected a list of integers"),
        ("bos_token_id", 512, "`bos_token_id` is 512, expected ids below `vocab_size` (512)"),
        ("eos_token_id", [1, 900], "expected ids below `vocab_size` (512)"),
        ("expert_dtype", "int4", "`expert_dtype` is 'int4'; DeepSeek-V4 defines 'fp4'"),
        ("rope_scaling", "yarn", "`rope_scaling` is 'yarn', expected an object"),
        ("rope_scaling", {"type": "linear", "factor": 2}, "`rope_scaling.type` is 'linear'"),
        ("rope_scaling", {"type": "yarn", "factor": 16}, "`rope_scaling.original_max_position_embeddings` is missing"),
        ("rope_scaling", {"type": "yarn", "mscale": 1.0}, "`rope_scaling.mscale` is 1.0; DeepSeek-V4 defines no such"),
        ("compress_rope_theta", None, "`compress_rope_theta` is missing"),
    ],
)
def test_refused(key: str, value: object, message: str) -> None:
    assert message in refusal(tiny_config_json(**{key: value}))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq"}, "`quantization_config.quant_method` is 'awq'; dsv4c reads 'fp8'"),
        ({}, "`quantization_config.quant_method` is None"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "`quantization_config.fmt` is 'e5m2'; dsv4c reads 'e4m3'"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "`quantization_config.activation_scheme` is 'static'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "expected two sizes: rows, columns"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "expected a list of integers of at least 1"),
    ],
)
def test_refused_quantization(quantization: dict[str, object], message: str) -> None:
    assert message in refusal(tiny_config_json(quantization_config=quantization))


@pytest.mark.parametrize(
    ("key", "value", "names"),
    [
        (
            "layer_types",
            ["sliding_attention"] * 6,
            ["`layer_types[2]` says 'window'", "`compress_ratios[2]` says 'csa'"],
        ),
        ("compress_rates", {"compressed_sparse_attention": 4, "heavily_compressed_attention": 64}, ["64", "128"]),
        ("mlp_layer_types", ["moe"] * 6, ["`mlp_layer_types[0]` says 'moe'", "`num_hash_layers (layer 0)`"]),
        ("partial_rotary_factor", 0.25, ["`partial_rotary_factor (of 128)` says 32", "`qk_rope_head_dim` says 64"]),
        ("rope_theta", 5000, ["`rope_parameters.main.rope_theta` says 10000.0", "`rope_theta` says 5000.0"]),
        ("compress_rope_theta", 40000, ["`rope_parameters.compress.rope_theta` says 160000.0"]),
        (
            "rope_scaling",
            {"type": "default"},
            ["`rope_parameters.compress` says YarnScaling", "`rope_scaling` says None"],
        ),
    ],
)
def test_dialects_that_disagree(key: str, value: object, names: list[str]) -> None:
    message = refusal(transformers_dialect(tiny_config_json()) | tiny_config_json() | {key: value})
    assert all(name in message for name in names), message


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("layer_types", ["sliding_attention"] * 5, "`layer_types` has 5 entries, `num_hidden_layers` is 6"),
        ("layer_types", ["full_attention"] * 6, "`layer_types[0]` is 'full_attention', expected one of"),
        ("mlp_layer_types", ["moe"] * 7, "`mlp_layer_types` has 7 entries, `num_hidden_layers` is 6"),
        ("compress_rates", None, "`layer_types` needs `compress_rates`"),
        (
            "compress_rates",
            {"compressed_sparse_attention": 8, "heavily_compressed_attention": 16},
            "expected 4 for CSA",
        ),
        (
            "compress_rates",
            {"compressed_sparse_attention": 4},
            "`compress_rates.heavily_compressed_attention` is missing",
        ),
        ("partial_rotary_factor", 0.3, "expected a whole number of the 128 channels"),
        ("rope_parameters", {"rope_type": "yarn"}, "`rope_parameters` must have `main` and `compress`"),
    ],
)
def test_refused_transformers_keys(key: str, value: object, message: str) -> None:
    assert message in refusal(transformers_dialect(tiny_config_json()) | {key: value})


def test_magnitude_factor_is_refused() -> None:
    config_json = transformers_dialect(tiny_config_json())
    config_json["rope_parameters"]["compress"]["attention_factor"] = 1.277
    assert "attention_factor` is 1.277; DeepSeek-V4 defines 1" in refusal(config_json)


def test_generation_config_overrides_eos(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config_json()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert read_config(tmp_path).eos_token_ids == (1, 7)


def test_folder_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_config(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_config(tmp_path)
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        read_config(tmp_path)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match="is a JSON list, expected an object"):
        read_config(tmp_path)
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(CheckpointError, match="is not UTF-8"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match="is a file, expected a checkpoint folder"):
        read_config(path)


@pytest.mark.parametrize("key", ["rope_theta", "compress_rope_theta"])
@pytest.mark.parametrize("base", [1, 0.5])
def test_rotary_base_without_frequencies(key: str, base: float) -> None:
    with pytest.raises(CheckpointError, match=f"`{key}` is .*expected more than 1"):
        parse_config(tiny_config_json(**{key: base}), "config.json")
