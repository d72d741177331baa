"""Shard headers and the index: agreement with the library, and a clear refusal of every damage."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dsv4c.checkpoint.safetensors import read_header, read_index, read_tensors
from dsv4c.errors import CheckpointError
from tests.fixtures import TINY_OFFICIAL, write_tensors


def write_shard(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_extents_equal_the_library(tmp_path: Path) -> None:
    path = TINY_OFFICIAL / "model-00001-of-00002.safetensors"
    header = read_header(path)
    data = path.read_bytes()
    with safe_open(path, framework="pt") as library:
        assert set(library.keys()) == header.keys()
        for name in list(header)[::40]:
            tensor, stored = library.get_tensor(name), header[name]
            assert tuple(tensor.shape) == stored.shape
            expected = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            assert data[stored.offset : stored.offset + stored.size_bytes] == expected


def test_padding_key_order_and_empty_tensors_are_accepted(tmp_path: Path) -> None:
    header = {
        "z": {"data_offsets": [4, 8], "shape": [], "dtype": "F32"},
        "__metadata__": {"format": "pt"},
        "empty": entry("F32", [0, 3], 4, 4),
        "a": entry("BF16", [2], 0, 4),
    }
    path = write_shard(tmp_path / "a.safetensors", json.dumps(header).encode() + b"   ", bytes(8))
    tensors = read_header(path)
    assert list(tensors) == ["z", "empty", "a"]
    assert tensors["z"].offset + 4 == path.stat().st_size
    assert tensors["z"].shape == () and tensors["empty"].size_bytes == 0
    with safe_open(path, framework="pt") as library:
        assert set(library.keys()) == tensors.keys()


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        (b"{", 0, "is not valid JSON"),
        (b"[" * 100_000, 0, "is not valid JSON"),
        (b"[]", 0, "is a JSON list, expected an object"),
        (b'{"\xff": 1}', 0, "is not UTF-8"),
        (b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": 1}', 1, "has the name `a` twice"),
        ({"a": 3}, 0, "tensor `a`: expected an object with dtype, shape and data_offsets"),
        ({"a": {"dtype": "U8", "shape": [1]}}, 1, "tensor `a`: expected an object with dtype, shape and data_offsets"),
        ({"a": entry("F7", [1], 0, 1)}, 1, "tensor `a`: unknown dtype 'F7'"),
        ({"a": {"dtype": ["U8"], "shape": [1], "data_offsets": [0, 1]}}, 1, r"unknown dtype \['U8'\]"),
        ({"a": entry("U8", [-1], 0, 1)}, 1, r"shape is \[-1\], expected sizes >= 0"),
        ({"a": entry("U8", [True], 0, 1)}, 1, r"shape is \[True\], expected sizes >= 0"),
        ({"a": entry("U8", [1], -1, 0)}, 1, r"data_offsets is \[-1, 0\], expected"),
        ({"a": entry("U8", [1], 0.0, 1)}, 1, r"data_offsets is \[0.0, 1\], expected"),
        ({"a": entry("U8", [1], 1, 0)}, 1, "the end lies before the begin"),
        ({"a": entry("F32", [2], 0, 4)}, 4, r"its extent is 4 bytes, F32 \[2\] needs 8"),
        ({"a": entry("F4", [3], 0, 1)}, 1, r"F4 \[3\] needs 1.5"),
        ({"a": entry("U8", [1 << 80], 0, 1 << 80)}, 1, "its header says"),
        # Multiplied out, this shape has a million digits.
        (
            {"a": entry("U8", [10**18] * 50_000, 0, 1)},
            1,
            r"its extent is 1 bytes, U8 \[1000000000000000000, .*\.\.\.\]",
        ),
        ({"a": entry("U8", [-1] * 50_000, 0, 1)}, 1, r"shape is \[-1, -1, -1, -1, -1, -1, \.\.\.\], expected"),
        ({"a": entry("U8", [8], 0, 8)}, 7, "is [0-9]+ bytes, its header says [0-9]+$"),
        ({"a": entry("U8", [8], 0, 8)}, 9, "1 bytes too many"),
        ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, 6, "tensor `b` overlaps `a`"),
        ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 6, 10)}, 10, "2 bytes before tensor `b` belong to no"),
        ({"a": entry("U8", [4], 1, 5)}, 5, "1 bytes before tensor `a` belong to no tensor"),
        ({"__metadata__": {"a": 1}}, 0, "`__metadata__` must map names to strings"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: object, data_bytes: int, message: str) -> None:
    path = write_shard(tmp_path / "model.safetensors", header, bytes(data_bytes))
    with pytest.raises(CheckpointError, match=message) as raised:
        read_header(path)
    assert str(path) in raised.value.message


def test_header_length(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"short")
    with pytest.raises(CheckpointError, match="is 5 bytes, too short for a safetensors file"):
        read_header(path)
    for length in (2**63, 2**64 - 1):
        with pytest.raises(CheckpointError, match=f"its header alone claims {length}"):
            read_header(write_shard(path, {}, length=length))
    # A sparse file: large enough for the claim, which is still absurd.
    with path.open("wb") as file:
        file.write((150_000_000).to_bytes(8, "little"))
        file.truncate(200_000_000)
    with pytest.raises(CheckpointError, match="header of 150000000 bytes, the format allows 100000000"):
        read_header(path)
    with pytest.raises(CheckpointError, match=r"cannot read .*absent"):
        read_header(tmp_path / "absent.safetensors")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, whole)
    data = whole.read_bytes()
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            read_header(cut)


def two_shards(folder: Path) -> Path:
    write_tensors(folder, {"a": torch.ones(2), "b": torch.ones(3)}, shards=2)
    return folder / "model.safetensors.index.json"


def test_index_or_single_file(tmp_path: Path) -> None:
    two_shards(tmp_path)
    index = read_index(tmp_path)
    assert [shard.name for shard in index.shards] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert read_tensors(tmp_path).keys() == {"a", "b"}
    single = tmp_path / "single"
    single.mkdir()
    write_tensors(single, {"a": torch.ones(2)})
    assert read_index(single).placement is None
    assert read_tensors(single).keys() == {"a"}


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors\.index\.json nor model\.safetensors$"):
        read_index(tmp_path)
    index = two_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="1 of 2 shards are missing: model-00002-of-00002"):
        read_index(tmp_path)
    index.unlink()
    with pytest.raises(CheckpointError, match="; it has model-00001-of-00002"):
        read_index(tmp_path)


def test_stray_files(tmp_path: Path) -> None:
    two_shards(tmp_path)
    save_file({"c": torch.ones(1)}, tmp_path / "model-00003-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"does not name the shard model-00003-of-00003.safetensors \(1 such\)"):
        read_index(tmp_path)
    (tmp_path / "model-00003-of-00003.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has both model.safetensors and model.safetensors.index.json"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"c": "model-00001-of-00002.safetensors"}, "says tensor `c` is in model-00001-of-00002.safetensors, where it"),
        ({"b": "model-00001-of-00002.safetensors", "a": "model-00002-of-00002.safetensors"}, "where it is not"),
        ({"b": None}, "has the tensor `b`, which model.safetensors.index.json does not name"),
        ({"b": "../model-00001-of-00002.safetensors"}, "expected a file name"),
        ({"b": 3}, "tensor `b` is in 3, expected a file name"),
        ({"b": ""}, "1 of 3 shards are missing"),
        ({"b": ".."}, "1 of 3 shards are missing"),
        ({"b": "x" * 5000}, "1 of 3 shards are missing: xxx"),
        ({"b": "a\0b"}, "1 of 3 shards are missing"),
        ({"b": "\ud800"}, "1 of 3 shards are missing"),
    ],
)
def test_index_and_shards_disagree(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    index = two_shards(tmp_path)
    # A third tensor keeps both shards named when one is dropped from the map.
    save_file({"b": torch.ones(3), "d": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"] | {"d": "model-00002-of-00002.safetensors"} | change
    weight_map = {name: shard for name, shard in weight_map.items() if shard is not None}
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        read_tensors(tmp_path)


def test_index_without_a_map(tmp_path: Path) -> None:
    for text in ("{}", '{"weight_map": []}', '{"weight_map": {}}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match="`weight_map` must be an object"):
            read_index(tmp_path)


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    two_shards(tmp_path)
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor `a` is in both .*00001-of-00002.* and .*00002-of-00002"):
        read_tensors(tmp_path)
