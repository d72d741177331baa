"""One pass over every byte of a checkpoint: its digest, and the check of its values.

A checkpoint may be hundreds of gigabytes on a slow disk, so what needs all of it is done together.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import torch

from dsv4c.checkpoint.checkpoint import Checkpoint, WeightInfo
from dsv4c.checkpoint.formats import Encoding
from dsv4c.checkpoint.mapped_shards import TORCH_DTYPES
from dsv4c.checkpoint.values import StoredPart, check_expert_ids, check_piece
from dsv4c.errors import CheckpointError

_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class Scan:
    """`digest`: hex sha256 over config.json and every shard in name order; where the folder lies is no part of it."""

    digest: str
    warnings: list[str]


class _Hash(Protocol):
    def update(self, data: memoryview, /) -> None: ...


def scan_checkpoint(
    checkpoint: Checkpoint, *, check_values: bool = True, progress: Callable[[int, int], None] | None = None
) -> Scan:
    """Read the whole checkpoint once; `progress(done bytes, total bytes)` now and then.

    With `check_values` the values of the main model's weights are checked: raises CheckpointError, naming file, tensor
    and index, for NaN or infinity, for a scale that decodes to them, and for a hash table with ids that are no experts.
    """
    sha256 = hashlib.sha256()
    parts = _parts_by_shard(checkpoint.weights.values()) if check_values else {}
    files = [checkpoint.path / "config.json", *checkpoint.shard_paths]
    total = sum(_size(path) for path in files)
    warnings: list[str] = []
    done = 0
    for path in files:
        scanner = _FileScan(path, sha256, checkpoint.config.n_routed_experts)
        try:
            with path.open("rb") as file:
                for count in scanner.run(file, parts.get(path, [])):
                    done += count
                    if progress is not None:
                        progress(done, total)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        warnings += scanner.warnings
    return Scan(sha256.hexdigest(), warnings)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def _parts_by_shard(weights: Iterable[WeightInfo]) -> dict[Path, list[StoredPart]]:
    """Every weight and its scales by shard, in the order they lie there."""
    parts: dict[Path, list[StoredPart]] = {}
    for info in weights:
        for stored, scales in ((info.stored, False), (info.scales, True)):
            if stored is None:
                continue
            # An expert's part of a stacked tensor is found by its own name; so are scales by their weight's.
            alias = "" if stored.name == info.name or scales else f" ({info.name})"
            what = "scales" if scales else "tensor"
            part = StoredPart(f"{stored.shard}: {what} `{stored.name}`{alias}", stored, info.encoding, scales)
            parts.setdefault(stored.shard, []).append(part)
    for listed in parts.values():
        listed.sort(key=lambda part: part.stored.offset)
    return parts


class _FileScan:
    """Hashes a file from its first byte to its last, and checks the parts it meets on the way."""

    def __init__(self, path: Path, sha256: _Hash, experts: int) -> None:
        self.path = path
        self.warnings: list[str] = []
        self._sha256 = sha256
        self._experts = experts
        self._buffer = bytearray(_READ_BYTES)

    def run(self, file: IO[bytes], parts: list[StoredPart]) -> Iterator[int]:
        """Yields the number of bytes after each piece."""
        size = file.seek(0, 2)
        file.seek(0)
        # The size marks where one file ends and the next begins.
        self._sha256.update(memoryview(size.to_bytes(8, "little")))
        position = 0
        for part in parts:
            yield from self._skip(file, part.stored.offset - position)
            yield from self._part(file, part)
            position = part.stored.offset + part.stored.size_bytes
        yield from self._skip(file, size - position)

    def _skip(self, file: IO[bytes], size: int) -> Iterator[int]:
        """What no part covers: the header, draft tensors."""
        while size > 0:
            count = min(size, len(self._buffer))
            self._read(file, self._buffer, count)
            size -= count
            yield count

    def _part(self, file: IO[bytes], part: StoredPart) -> Iterator[int]:
        stored = part.stored
        dtype = TORCH_DTYPES[stored.dtype]
        if part.encoding is Encoding.INT64:
            # A table is checked as a whole, and small: 8 bytes an expert and token.
            table = bytearray(stored.size_bytes)
            self._read(file, table, len(table))
            if table:
                ids = torch.frombuffer(table, dtype=dtype).view(stored.shape)
                self.warnings += check_expert_ids(part.label, ids, self._experts)
            yield len(table)
            return
        done = 0
        while done < stored.size_bytes:
            count = min(stored.size_bytes - done, len(self._buffer))
            self._read(file, self._buffer, count)
            values = torch.frombuffer(self._buffer, dtype=dtype, count=count // dtype.itemsize)
            check_piece(part, values, done // dtype.itemsize)
            done += count
            yield count

    def _read(self, file: IO[bytes], buffer: bytearray, count: int) -> None:
        view = memoryview(buffer)[:count]
        read = 0
        while read < count:
            more = file.readinto(view[read:])  # type: ignore[attr-defined]  # IO has no readinto; a binary file does
            if not more:
                raise CheckpointError(f"{self.path} has shrunk since it was opened")
            read += more
        self._sha256.update(view)
