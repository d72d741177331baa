"""safetensors headers: where every tensor lies, with everything checked that the header alone can tell.

Layout of a shard: u64 little-endian header size, JSON header, tensor bytes without gaps. The library gives no file
offsets, and the engine streams raw extents.
"""

import json
import os
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4c.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_LENGTH_BYTES = 8
# Beyond any file: sizes are not multiplied further, as a damaged shape could make the product as long as the header.
_MAX_BITS = 1 << 128
_SHARD_NAME = re.compile(r"model-\d+-of-\d+\.safetensors")

DTYPE_BITS: Mapping[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

_DAMAGED = "the file is damaged or was not downloaded whole; download it again"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's extent in a shard. `offset` counts from the start of the file; `dtype` is the safetensors string."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Path
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class ShardIndex:
    """The shards of a checkpoint in name order; `placement` (tensor name -> shard) is None without an index file."""

    source: Path
    shards: tuple[Path, ...]
    placement: Mapping[str, Path] | None


class _DuplicateKeyError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return result


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError on bad UTF-8 or JSON, a duplicate key, or anything but an object."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not UTF-8 (byte {error.start})", hint=_DAMAGED) from error
    except _DuplicateKeyError as error:
        raise CheckpointError(f"{where} has the name `{error}` twice", hint="write the file again") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}", hint=_DAMAGED) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is a JSON {type(value).__name__}, expected an object", hint=_DAMAGED)
    return value


def read_json(path: Path) -> dict[str, Any]:
    """`parse_json` of a file. Raises CheckpointError when it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return parse_json(data, str(path))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _size_bits(shape: list[int], bits: int) -> int:
    if 0 in shape:
        return 0
    for size in shape:
        bits *= size
        if bits > _MAX_BITS:
            break
    return bits


def _parse_entry(shard: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    where = f"{shard}: tensor `{name}`"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where}: expected an object with dtype, shape and data_offsets", hint=_DAMAGED)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{where}: unknown dtype {reprlib.repr(dtype)}", hint=f"safetensors dtypes are {', '.join(DTYPE_BITS)}"
        )
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        raise CheckpointError(f"{where}: shape is {reprlib.repr(shape)}, expected sizes >= 0", hint=_DAMAGED)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise CheckpointError(
            f"{where}: data_offsets is {reprlib.repr(offsets)}, expected [begin, end] >= 0", hint=_DAMAGED
        )
    begin, end = offsets
    if end < begin:
        raise CheckpointError(
            f"{where}: data_offsets is {reprlib.repr(offsets)}: the end lies before the begin", hint=_DAMAGED
        )
    bits = _size_bits(shape, DTYPE_BITS[dtype])
    if bits % 8 or bits // 8 != end - begin:
        raise CheckpointError(
            f"{where}: its extent is {end - begin} bytes, {dtype} {reprlib.repr(shape)} needs {bits / 8:g}",
            hint=_DAMAGED,
        )
    return StoredTensor(name, dtype, tuple(shape), shard, data_start + begin, end - begin)


def _check_coverage(shard: Path, tensors: Mapping[str, StoredTensor], data_start: int, file_size: int) -> None:
    """Every data byte belongs to exactly one tensor."""
    ordered = sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.offset + tensor.size_bytes))
    declared = max((tensor.offset + tensor.size_bytes for tensor in ordered), default=data_start)
    if declared > file_size:
        raise CheckpointError(f"{shard} is {file_size} bytes, its header says {declared}", hint=_DAMAGED)
    position, previous = data_start, "the header"
    for tensor in ordered:
        if tensor.offset < position:
            raise CheckpointError(f"{shard}: tensor `{tensor.name}` overlaps `{previous}`", hint=_DAMAGED)
        if tensor.offset > position:
            raise CheckpointError(
                f"{shard}: {tensor.offset - position} bytes before tensor `{tensor.name}` belong to no tensor",
                hint=_DAMAGED,
            )
        position, previous = tensor.offset + tensor.size_bytes, tensor.name
    if position != file_size:
        raise CheckpointError(
            f"{shard} is {file_size} bytes, its header says {position}: {file_size - position} bytes too many",
            hint=_DAMAGED,
        )


def read_header(shard: Path) -> dict[str, StoredTensor]:
    """The tensors of one shard, by name, in header order; reads no tensor bytes.

    Raises CheckpointError when the header is not valid or its extents do not tile the rest of the file exactly.
    """
    try:
        with shard.open("rb") as file:
            file_size = file.seek(0, 2)
            file.seek(0)
            if file_size < _LENGTH_BYTES:
                raise CheckpointError(f"{shard} is {file_size} bytes, too short for a safetensors file", hint=_DAMAGED)
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > file_size - _LENGTH_BYTES:
                raise CheckpointError(
                    f"{shard} is {file_size} bytes, its header alone claims {length}",
                    hint="this is not a safetensors file (a git-lfs pointer?), or was not downloaded whole",
                )
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{shard}: header of {length} bytes, the format allows {MAX_HEADER_BYTES}")
            data = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {shard}: {error.strerror}") from error
    header = parse_json(data, f"the header of {shard}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{shard}: `__metadata__` must map names to strings", hint=_DAMAGED)
    data_start = _LENGTH_BYTES + length
    tensors = {name: _parse_entry(shard, name, entry, data_start) for name, entry in header.items()}
    _check_coverage(shard, tensors, data_start, file_size)
    return tensors


def read_index(folder: Path) -> ShardIndex:
    """The shards of a checkpoint folder, from `model.safetensors.index.json` or a single `model.safetensors`.

    Raises CheckpointError when there is neither or both, when a shard is missing, or when the index leaves one out.
    """
    index_path, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if not index_path.exists():
        if single.exists():
            return ShardIndex(single, (single,), None)
        strays = sorted(path.name for path in folder.glob("*.safetensors"))
        found = f"; it has {', '.join(strays[:3])}" if strays else ""
        raise CheckpointError(
            f"{folder} has neither {INDEX_NAME} nor {SINGLE_NAME}{found}",
            hint="dsv4c reads safetensors checkpoints; download the index file together with the shards",
        )
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: `weight_map` must be an object with the shard of every tensor")
    for name, shard in weight_map.items():
        # A shard is a file of this folder: no separators, no way up.
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard:
            raise CheckpointError(f"{index_path}: tensor `{name}` is in {reprlib.repr(shard)}, expected a file name")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not os.path.isfile(folder / name)]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} shards are missing: {', '.join(missing[:3])}",
            hint="download the missing shards",
        )
    if single.exists() and SINGLE_NAME not in names:
        raise CheckpointError(
            f"{folder} has both {SINGLE_NAME} and {INDEX_NAME}, which does not name it",
            hint="remove the one that is not part of the checkpoint",
        )
    strays = sorted(path.name for path in folder.iterdir() if _SHARD_NAME.fullmatch(path.name))
    strays = [name for name in strays if name not in names]
    if strays:
        raise CheckpointError(
            f"{folder}: {INDEX_NAME} does not name the shard {strays[0]} ({len(strays)} such)",
            hint="shards of two checkpoints may be mixed; remove those that do not belong",
        )
    placement = {name: folder / shard for name, shard in weight_map.items()}
    return ShardIndex(index_path, tuple(folder / name for name in names), placement)


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint folder, by stored name, from headers alone.

    Raises CheckpointError for any bad header and when index and shards disagree.
    """
    index = read_index(folder)
    tensors: dict[str, StoredTensor] = {}
    for shard in index.shards:
        for name, tensor in read_header(shard).items():
            if name in tensors:
                raise CheckpointError(f"tensor `{name}` is in both {tensors[name].shard} and {shard}")
            if index.placement is not None and name not in index.placement:
                raise CheckpointError(
                    f"{shard} has the tensor `{name}`, which {INDEX_NAME} does not name",
                    hint="index and shards are of different checkpoints; download both again",
                )
            tensors[name] = tensor
    for name, shard in (index.placement or {}).items():
        if name not in tensors or tensors[name].shard != shard:
            raise CheckpointError(
                f"{index.source} says tensor `{name}` is in {shard.name}, where it is not",
                hint="index and shards are of different checkpoints; download both again",
            )
    return tensors
