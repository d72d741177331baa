"""Opening a checkpoint: each thing that can be wrong has its own message, before a weight is read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from dsv4c.checkpoint.checkpoint import Checkpoint, open_checkpoint
from dsv4c.checkpoint.formats import Encoding
from dsv4c.checkpoint.mapped_shards import MappedShards
from dsv4c.checkpoint.safetensors import read_header
from dsv4c.checkpoint.shapes import dspark_shapes, mtp_shapes
from dsv4c.errors import CheckpointError
from tests.fixtures import (
    ODD_CONFIGS,
    TINY_OFFICIAL,
    Quantization,
    config_of,
    random_weights,
    read_weights,
    tiny_config_json,
    write_checkpoint,
    write_tensors,
)

NARROW = ODD_CONFIGS["narrow"]
Change = Callable[[dict[str, Tensor]], Any]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A narrow model in the released form, one shard."""
    weights = random_weights(config_of(NARROW), seed=0)
    folder = tmp_path_factory.mktemp("released")
    return write_checkpoint(folder, NARROW, weights, quantization="fp8_fp4", shards=1, dtype="bfloat16")


def altered(released: Path, folder: Path, change: Change) -> Path:
    tensors = load_file(released / "model.safetensors")
    change(tensors)
    write_tensors(folder, tensors)
    shutil.copy(released / "config.json", folder)
    return folder


def test_encodings(released: Path) -> None:
    checkpoint = open_checkpoint(released)
    kinds = {
        "embed.weight": (Encoding.BF16, None, torch.bfloat16),
        "hc_head_fn": (Encoding.F32, None, torch.float32),
        "layers.0.attn.wq_a.weight": (Encoding.FP8_BLOCK, (128, 128), torch.float8_e4m3fn),
        "layers.1.attn.indexer.wq_b.weight": (Encoding.FP8_BLOCK, (128, 128), torch.float8_e4m3fn),
        "layers.1.attn.compressor.wkv.weight": (Encoding.BF16, None, torch.bfloat16),
        "layers.2.ffn.experts.4.w2.weight": (Encoding.FP4_GROUP, (1, 32), torch.uint8),
        "layers.0.ffn.gate.tid2eid": (Encoding.INT64, None, torch.int64),
        "layers.2.ffn.gate.bias": (Encoding.F32, None, torch.float32),
    }
    for name, (encoding, block, dtype) in kinds.items():
        info = checkpoint.weights[name]
        assert (info.encoding, info.block, checkpoint.codes(name).dtype) == (encoding, block, dtype)
        assert tuple(checkpoint.values(name).shape) == info.shape
        assert (checkpoint.scales(name) is None) == (block is None)
    with pytest.raises(KeyError):
        checkpoint.codes("layers.9.attn_norm.weight")


def test_codes_are_the_file(released: Path) -> None:
    checkpoint = open_checkpoint(released)
    with safe_open(released / "model.safetensors", framework="pt") as library:
        for name in checkpoint.weights:
            expected = library.get_tensor(name).contiguous()
            codes = checkpoint.codes(name)
            assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8)), name
            checkpoint.release(name)
            # Released pages are read again.
            assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8)), name


def test_values_are_the_callers_own(released: Path) -> None:
    checkpoint = open_checkpoint(released)
    for name in ("hc_head_base", "layers.0.ffn.gate.tid2eid"):
        checkpoint.values(name).zero_()
        assert checkpoint.codes(name).any()


@pytest.mark.parametrize(("quantization", "limit"), [("none", 0.0), ("bf16", 0.004), ("fp8", 0.04), ("fp8_fp4", 0.13)])
@pytest.mark.parametrize("scale_dtype", ["ue8m0", "float32"])
def test_values_are_near_what_was_written(
    tmp_path: Path, quantization: Quantization, limit: float, scale_dtype: Any
) -> None:
    config_json = ODD_CONFIGS["partial_blocks"]
    weights = random_weights(config_of(config_json), seed=1)
    folder = write_checkpoint(tmp_path, config_json, weights, quantization=quantization, scale_dtype=scale_dtype)
    for name, values in read_weights(folder).items():
        difference = (values.double() - weights[name].double()).norm() / weights[name].double().norm()
        assert difference <= limit, name


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    weights = random_weights(config_of(NARROW), seed=0)
    folder = write_checkpoint(tmp_path, NARROW, weights, shards=1)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    # One space more in the header moves every tensor off its alignment.
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    for name, values in read_weights(folder).items():
        assert torch.equal(values, weights[name])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc: resident memory cannot be read")
def test_release_drops_the_pages(tmp_path: Path) -> None:
    def resident_file_bytes() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssFile:")[1].split()[0]) * 1024

    size = 32 << 20
    write_tensors(tmp_path, {"a": torch.ones(size, dtype=torch.uint8)})
    stored = read_header(tmp_path / "model.safetensors")["a"]
    shards = MappedShards()
    before = resident_file_bytes()
    codes = shards.view(stored)
    assert resident_file_bytes() - before < size // 4
    assert codes.max() == 1
    assert resident_file_bytes() - before > size * 3 // 4
    shards.release(stored)
    assert resident_file_bytes() - before < size // 4


def put(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


def drop(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names]


TID2EID = "layers.0.ffn.gate.tid2eid"
EXPERT = "layers.2.ffn.experts.3.w1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("norm.weight"), r"1 of 128 tensors are missing: `norm.weight` \(official naming\)"),
        (drop("norm.weight", "embed.weight", "hc_head_fn", TID2EID), "4 of 128 tensors .* and 1 more"),
        (put("layers.3.attn_norm.weight", torch.ones(96)), "1 tensors do not belong .* `layers.3.attn_norm.weight`"),
        (put("vision.weight", torch.ones(1)), "1 tensors do not belong to the model of config.json: `vision.weight`"),
        (put("layers.2.ffn.gate.tid2eid", torch.ones(97, 2).long()), "do not belong .*`layers.2.ffn.gate.tid2eid`"),
        (put("norm.weight", torch.ones(95)), r"tensor `norm.weight` has shape \[95\], expected \[96\]"),
        (put("norm.weight", torch.ones(96).double()), "`norm.weight` is F64, expected F32, BF16, F16"),
        (put("embed.weight", torch.ones(97, 96).to(torch.float8_e4m3fn)), "`embed.weight` is F8_E4M3, expected F32"),
        (put("layers.0.ffn.gate.weight", torch.ones(5, 96).char()), "gate.weight` is I8, expected F32, BF16, F16$"),
        (put("layers.0.attn.wq_a.weight", torch.ones(48, 96).char()), "is I8, expected F32, BF16, F16, F8_E4M3$"),
        (put(f"{EXPERT}.weight", torch.ones(64, 96).short()), r"is I16, expected .*, I8 or U8 \(packed FP4\)"),
        (put(TID2EID, torch.ones(97, 2).int()), "tid2eid` is I32, expected I64: it holds expert ids"),
        (put(TID2EID, torch.ones(97, 2).bfloat16()), "tid2eid` is BF16, expected I64: it holds expert ids"),
        (put(TID2EID, torch.ones(97, 3).long()), r"tid2eid` has shape \[97, 3\], expected \[97, 2\]"),
        (drop("layers.0.attn.wq_a.scale"), "`layers.0.attn.wq_a.weight` is F8_E4M3 but has no scales"),
        (drop(f"{EXPERT}.scale"), f"`{EXPERT}.weight` is I8 but has no scales"),
        (
            put("layers.0.attn.wq_a.scale", torch.ones(2, 1)),
            r"wq_a.scale` .*\[2, 1\], expected \[1, 1\]: one per 128 x",
        ),
        (put("layers.0.attn.wq_a.scale", torch.ones(1, 1).bfloat16()), "are BF16, expected F8_E8M0, U8, F32"),
        (put("layers.0.attn.wq_a.weight", torch.ones(48, 96)), "is F32 and yet has scales, `layers.0.attn.wq_a.scale`"),
        (put("norm.scale", torch.ones(1)), "`norm.weight` is BF16 and yet has scales"),
        (
            put(f"{EXPERT}.weight", torch.ones(64, 96).char()),
            r"has shape \[64, 96\], expected \[64, 48\]: FP4, two of 96",
        ),
        (put(f"{EXPERT}.scale", torch.ones(64, 4)), r"have shape \[64, 4\], expected \[64, 3\]: one per 1 x 32 block"),
        (drop("layers.0.ffn.experts.0.w1.weight"), r"1 of 128 tensors are missing: `layers.0.ffn.experts.0.w1.weight`"),
    ],
)
def test_refused(released: Path, tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        open_checkpoint(altered(released, tmp_path, change))
    assert str(tmp_path) in raised.value.message


@pytest.mark.parametrize(
    "change",
    [
        put("norm.weight", torch.ones(96)),
        put("norm.weight", torch.ones(96).half()),
        put("hc_head_fn", torch.ones(2, 192).bfloat16()),
        put("layers.0.attn.wq_a.scale", torch.ones(1, 1)),
        put("layers.0.attn.wq_a.scale", torch.ones(1, 1).byte()),
        put(f"{EXPERT}.scale", torch.ones(64, 3)),
        put(f"{EXPERT}.weight", torch.ones(64, 48).byte()),
    ],
)
def test_accepted_variants(released: Path, tmp_path: Path, change: Change) -> None:
    assert open_checkpoint(altered(released, tmp_path, change)).warnings == []


def test_fp4_needs_whole_groups(tmp_path: Path) -> None:
    """An input size of 80 is two and a half groups."""
    config_json = NARROW | {"moe_intermediate_size": 80}
    weights = random_weights(config_of(config_json), seed=0)
    folder = write_checkpoint(tmp_path, config_json, weights, shards=1)
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.0.ffn.experts.0.w2.weight"] = torch.zeros(96, 40, dtype=torch.int8)
    write_tensors(folder, tensors)
    with pytest.raises(CheckpointError, match="is FP4 with an input size of 80, expected a multiple of 32"):
        open_checkpoint(folder)


def test_another_block_size(tmp_path: Path) -> None:
    config_json = NARROW | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 64]}}
    weights = random_weights(config_of(config_json), seed=0)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, config_json, weights, quantization="fp8"))
    scales = checkpoint.scales("layers.0.attn.wq_a.weight")
    assert scales is not None and tuple(scales.shape) == (3, 2)
    # The same file under the default block size does not fit.
    written = json.loads((tmp_path / "config.json").read_text())
    del written["quantization_config"]["weight_block_size"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(CheckpointError, match=r"have shape \[3, 2\], expected \[1, 1\]") as raised:
        open_checkpoint(tmp_path)
    assert raised.value.hint == "the block size is `quantization_config.weight_block_size`"


def test_expert_dtype_of_the_config_is_only_a_claim(released: Path, tmp_path: Path) -> None:
    folder = altered(released, tmp_path, lambda tensors: None)
    written = json.loads((folder / "config.json").read_text())
    # An older download lacks the key; the headers decide.
    del written["expert_dtype"]
    (folder / "config.json").write_text(json.dumps(written))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.warnings == []
    assert checkpoint.weights[f"{EXPERT}.weight"].encoding is Encoding.FP4_GROUP
    weights = random_weights(config_of(NARROW), seed=0)
    other = write_checkpoint(tmp_path / "other", NARROW | {"expert_dtype": "fp4"}, weights)
    assert open_checkpoint(other).warnings == ["config.json says `expert_dtype` 'fp4', the experts are stored as f32"]


def with_draft(folder: Path, config_json: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Checkpoint:
    weights = random_weights(config_of(config_json), seed=0)
    draft = {name: torch.ones(shape) for name, shape in shapes.items()}
    return open_checkpoint(write_checkpoint(folder, config_json, weights | draft))


def test_draft_modules_are_kept_apart(tmp_path: Path) -> None:
    mtp_json = NARROW | {"num_nextn_predict_layers": 1, "compress_ratios": [8, 4, 0, 0]}
    dspark_json = NARROW | {"dspark_block_size": 5, "compress_ratios": [8, 4, 0, 0, 0]}
    modules = {
        "mtp": (mtp_json, mtp_shapes(config_of(mtp_json), 1)),
        "dspark": (dspark_json, dspark_shapes(config_of(dspark_json), stages=2, features=3, markov_rank=7)),
    }
    for kind, (config_json, shapes) in modules.items():
        checkpoint = with_draft(tmp_path / kind, config_json, shapes)
        assert checkpoint.warnings == []
        assert checkpoint.draft_weights.keys() == shapes.keys()
        assert not any(name.startswith("mtp.") for name in checkpoint.weights)
        assert checkpoint.config.draft is not None and checkpoint.config.draft.kind == kind
        assert checkpoint.values("mtp.0.attn_norm.weight").tolist() == [1.0] * 96


def test_draft_problems_are_warnings(tmp_path: Path) -> None:
    mtp_json = NARROW | {"num_nextn_predict_layers": 1}
    config = config_of(mtp_json)
    none = with_draft(tmp_path / "none", mtp_json, {})
    assert none.warnings == ["config.json announces a draft module (mtp), the weights have no `mtp.*` tensors"]
    other = with_draft(tmp_path / "other", mtp_json, dspark_shapes(config, 2, 3, 7))
    assert other.warnings == ["config.json announces mtp, the weights have the tensors of dspark"]
    shapes = mtp_shapes(config, 1)
    del shapes["mtp.0.e_proj.weight"]
    lacking = with_draft(tmp_path / "lacking", mtp_json, shapes | {"mtp.0.extra": (1,)})
    assert lacking.warnings == [
        "the draft module (mtp) lacks 1 tensors: `mtp.0.e_proj.weight`",
        "1 tensors are unknown to the draft module (mtp): `mtp.0.extra`",
    ]
    with pytest.raises(CheckpointError, match=r"`mtp\.0\.e_proj\.weight` has shape \[2, 96\], expected \[96, 96\]"):
        with_draft(tmp_path / "wrong", mtp_json, shapes | {"mtp.0.e_proj.weight": (2, 96)})
    strange = with_draft(tmp_path / "strange", NARROW, {"mtp.999999999.norm.weight": (96,)})
    assert strange.draft_weights == {} and len(strange.warnings) == 2


def test_tokenizer_files(released: Path) -> None:
    assert open_checkpoint(released).tokenizer_files() == {}
    files = open_checkpoint(TINY_OFFICIAL).tokenizer_files()
    assert files == {name: TINY_OFFICIAL / name for name in ("tokenizer.json", "tokenizer_config.json")}


def test_opening_reads_no_weights(released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("dsv4c.checkpoint.mapped_shards.mmap.mmap", refuse)
    open_checkpoint(released)


def test_a_shard_that_shrinks(released: Path, tmp_path: Path) -> None:
    folder = altered(released, tmp_path, lambda tensors: None)
    checkpoint = open_checkpoint(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    last = max(checkpoint.weights.values(), key=lambda info: info.stored.offset)
    with pytest.raises(CheckpointError, match=r"has shrunk to \d+ bytes"):
        checkpoint.codes(last.name)


def test_config_and_weights_of_two_models(released: Path, tmp_path: Path) -> None:
    folder = altered(released, tmp_path, lambda tensors: None)
    (folder / "config.json").write_text(json.dumps(tiny_config_json()))
    with pytest.raises(CheckpointError, match="of 448 tensors are missing"):
        open_checkpoint(folder)
