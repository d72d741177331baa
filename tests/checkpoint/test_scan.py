"""The one pass over a checkpoint: its digest, and values that headers cannot tell are wrong."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4c.checkpoint import scan
from dsv4c.checkpoint.checkpoint import Checkpoint, open_checkpoint
from dsv4c.checkpoint.scan import scan_checkpoint
from dsv4c.compiler import build_engine
from dsv4c.errors import CheckpointError
from dsv4c.recipe import Recipe
from dsv4c.runtime.engine import Engine
from tests.fixtures import ODD_CONFIGS, TINY_OFFICIAL, Naming, config_of, random_weights, write_checkpoint

NARROW = ODD_CONFIGS["narrow"]
TID2EID = "layers.0.ffn.gate.tid2eid"
EXPERT = "layers.2.ffn.experts.3.w1"
RECIPE = Recipe.for_target("cpu", None)
Change = Callable[[dict[str, Tensor]], Any]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A narrow model in the released form, one shard."""
    weights = random_weights(config_of(NARROW), seed=0)
    folder = tmp_path_factory.mktemp("released")
    return write_checkpoint(folder, NARROW, weights, quantization="fp8_fp4", shards=1, dtype="bfloat16")


def altered(released: Path, folder: Path, name: str, place: tuple[int, ...], pattern: bytes) -> Path:
    """A copy with the stored bytes of one element replaced."""
    shutil.copytree(released, folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])[name]
    at = 8 + length + entry["data_offsets"][0] + int(np.ravel_multi_index(place, entry["shape"])) * len(pattern)
    data[at : at + len(pattern)] = pattern
    path.write_bytes(data)
    return folder


def test_good_values(released: Path) -> None:
    assert scan_checkpoint(open_checkpoint(released)).warnings == []
    assert scan_checkpoint(open_checkpoint(TINY_OFFICIAL)).warnings == []


@pytest.mark.parametrize(
    ("name", "place", "pattern", "message"),
    [
        ("embed.weight", (50, 95), b"\xc0\x7f", "tensor `embed.weight`[50, 95] is nan"),
        ("embed.weight", (0, 0), b"\xff\xff", "tensor `embed.weight`[0, 0] is nan"),
        ("head.weight", (96, 95), b"\x80\xff", "tensor `head.weight`[96, 95] is -inf"),
        ("norm.weight", (3,), b"\x80\x7f", "tensor `norm.weight`[3] is inf"),
        ("layers.1.attn.attn_sink", (2,), b"\x00\x00\xc0\x7f", "tensor `layers.1.attn.attn_sink`[2] is nan"),
        ("hc_head_fn", (1, 7), b"\x00\x00\x80\xff", "tensor `hc_head_fn`[1, 7] is -inf"),
        ("layers.0.attn.wq_a.weight", (47, 1), b"\x7f", "tensor `layers.0.attn.wq_a.weight`[47, 1] is nan"),
        ("layers.0.attn.wq_a.weight", (0, 2), b"\xff", "tensor `layers.0.attn.wq_a.weight`[0, 2] is nan"),
        (
            "layers.0.attn.wq_a.scale",
            (0, 0),
            b"\xff",
            "scales `layers.0.attn.wq_a.scale`[0, 0] is exponent byte 255, which is nan",
        ),
        (
            "layers.0.attn.wq_a.scale",
            (0, 0),
            b"\xf7",
            "scales `layers.0.attn.wq_a.scale`[0, 0] is exponent byte 247, a scale beyond float32",
        ),
        (f"{EXPERT}.scale", (63, 2), b"\xff", f"scales `{EXPERT}.scale`[63, 2] is exponent byte 255, which is nan"),
        (f"{EXPERT}.scale", (0, 1), b"\xfd", f"scales `{EXPERT}.scale`[0, 1] is exponent byte 253, a scale beyond"),
    ],
)
def test_values_that_are_no_numbers(
    released: Path, tmp_path: Path, name: str, place: tuple[int, ...], pattern: bytes, message: str
) -> None:
    folder = altered(released, tmp_path / "bad", name, place, pattern)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=re.escape(f"{folder}/model.safetensors: {message}")) as raised:
        scan_checkpoint(checkpoint)
    assert "--no-check-values" in (raised.value.hint or "")
    assert len(scan_checkpoint(checkpoint, check_values=False).digest) == 64


def test_a_build_refuses_them_unless_told_not_to(released: Path, tmp_path: Path) -> None:
    folder = altered(released, tmp_path / "bad", f"{EXPERT}.scale", (63, 2), b"\xff")
    output = tmp_path / "out" / "e.dsv4c"
    output.parent.mkdir()
    with pytest.raises(CheckpointError, match="exponent byte 255, which is nan"):
        build_engine(folder, RECIPE, output)
    assert list(output.parent.iterdir()) == []
    build_engine(folder, RECIPE, output, check_values=False, goldens=False)


@pytest.mark.parametrize("pattern", [b"\x7e", b"\xfe"])
def test_the_largest_code_of_fp8_is_a_number(released: Path, tmp_path: Path, pattern: bytes) -> None:
    folder = altered(released, tmp_path / "c", "layers.0.attn.wq_a.weight", (5, 5), pattern)
    assert scan_checkpoint(open_checkpoint(folder)).warnings == []


@pytest.mark.parametrize(("name", "largest"), [("layers.0.attn.wq_a.scale", 246), (f"{EXPERT}.scale", 252)])
def test_the_largest_scale_decodes_to_numbers(released: Path, tmp_path: Path, name: str, largest: int) -> None:
    folder = altered(released, tmp_path / "c", name, (0, 0), bytes([largest]))
    checkpoint = open_checkpoint(folder)
    assert scan_checkpoint(checkpoint).warnings == []
    assert torch.isfinite(checkpoint.values(name.replace(".scale", ".weight"))).all()


@pytest.mark.parametrize(
    ("value", "message"),
    [(float("nan"), "is nan"), (float("inf"), "is inf"), (2.0**126, "is a scale whose block can decode to infinity")],
)
def test_float_scales(tmp_path: Path, value: float, message: str) -> None:
    weights = random_weights(config_of(NARROW), seed=0)
    folder = write_checkpoint(tmp_path / "a", NARROW, weights, quantization="fp8", shards=1, scale_dtype="float32")
    assert scan_checkpoint(open_checkpoint(folder)).warnings == []
    pattern = np.float32(value).tobytes()
    bad = altered(folder, tmp_path / "b", "layers.1.attn.wkv.scale", (0, 0), pattern)
    with pytest.raises(CheckpointError, match=rf"scales `layers\.1\.attn\.wkv\.scale`\[0, 0\] {message}"):
        scan_checkpoint(open_checkpoint(bad))


def test_stacked_experts_are_named(tmp_path: Path) -> None:
    weights = random_weights(config_of(NARROW), seed=0)
    weights["layers.1.ffn.experts.3.w3.weight"][4, 9] = float("inf")
    naming: Naming = "transformers"
    folder = write_checkpoint(tmp_path, NARROW, weights, naming=naming, shards=1)
    name = r"`model\.layers\.1\.mlp\.experts\.gate_up_proj` \(layers\.1\.ffn\.experts\.3\.w3\.weight\)"
    with pytest.raises(CheckpointError, match=rf"tensor {name}\[4, 9\] is inf"):
        scan_checkpoint(open_checkpoint(folder))


def test_a_bad_value_beyond_the_first_piece(released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_READ_BYTES", 64)
    folder = altered(released, tmp_path / "bad", "embed.weight", (50, 33), b"\xc0\x7f")
    with pytest.raises(CheckpointError, match=r"tensor `embed\.weight`\[50, 33\] is nan"):
        scan_checkpoint(open_checkpoint(folder))
    checkpoint = open_checkpoint(released)
    in_pieces = scan_checkpoint(checkpoint)
    monkeypatch.undo()
    assert in_pieces == scan_checkpoint(checkpoint) == scan_checkpoint(checkpoint, check_values=False)


def test_digest(released: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(released, copy)

    def digest(folder: Path) -> str:
        return scan_checkpoint(open_checkpoint(folder), check_values=False).digest

    expected = hashlib.sha256()
    for name in ("config.json", "model.safetensors"):
        data = (released / name).read_bytes()
        expected.update(len(data).to_bytes(8, "little") + data)
    assert digest(released) == digest(copy) == expected.hexdigest()
    (copy / "unrelated.txt").write_text("x")
    assert digest(copy) == digest(released)
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert digest(copy) != digest(released)


def test_every_byte_is_read_once(released: Path, tmp_path: Path) -> None:
    """What the pass asks the system for: the bytes of the files, and little else."""
    total = sum((released / name).stat().st_size for name in ("config.json", "model.safetensors"))
    seen: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(released)

    def bytes_read() -> int:
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]

    before = bytes_read()
    scan_checkpoint(checkpoint, progress=lambda done, of: seen.append((done, of)))
    assert total <= bytes_read() - before < total + 100_000
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_files_that_change_under_the_scan(released: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(released, folder)
    checkpoint = open_checkpoint(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has shrunk since it was opened"):
        scan_checkpoint(checkpoint)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        scan_checkpoint(checkpoint)


def table(change: Change, folder: Path) -> Checkpoint:
    weights = random_weights(config_of(NARROW), seed=0)
    change(weights)
    return open_checkpoint(write_checkpoint(folder, NARROW, weights))


@pytest.mark.parametrize("value", [-1, 5, 1 << 40])
def test_expert_ids_out_of_range(tmp_path: Path, value: int) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        weights[TID2EID][7, 1] = value

    with pytest.raises(
        CheckpointError, match=rf"tid2eid`\[7, 1\] is {value}, expected an expert id of 0\.\.4 \(1 such"
    ):
        scan_checkpoint(table(change, tmp_path))


def test_expert_ids_all_zero(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tid2eid` is all zeros"):
        scan_checkpoint(table(lambda weights: weights[TID2EID].zero_(), tmp_path))


def test_expert_ids_that_are_only_odd(tmp_path: Path) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        weights[TID2EID][90:] = 0
        weights[TID2EID][4] = 3

    zeros, repeats = scan_checkpoint(table(change, tmp_path)).warnings
    assert "tid2eid`: 7 rows are all zeros" in zeros
    assert "tid2eid`: 1 rows name an expert twice, first token 4" in repeats


def test_an_expert_of_zeros_with_the_smallest_exponent(released: Path, tmp_path: Path) -> None:
    """Exponent byte 0 is 2^-127, which float32 holds only as a subnormal; the output stays finite."""
    folder = tmp_path / "zero"
    shutil.copytree(released, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if ".ffn.experts.3." in name:
            tensor.view(torch.uint8).zero_()
    save_file(tensors, folder / "model.safetensors")
    build_engine(folder, RECIPE, tmp_path / "e", goldens=False)
    with Engine.open(tmp_path / "e", threads=1) as engine, engine.session(context=64) as session:
        ids = [index * 7 % 97 for index in range(64)]
        logits = session.step(ids, [0] * 64, list(range(64)))
    assert np.isfinite(logits).all() and logits.std() > 0.01


def test_a_tokenizer_that_is_not_text(released: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(released, folder)
    (folder / "tokenizer.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not UTF-8 \(byte 7\)"):
        open_checkpoint(folder).tokenizer_texts()
