"""Writing an engine: a temporary file in the same folder, sealed with digests, then renamed.

Nothing that looks like an engine exists before the last byte is on disk. Weights are streamed; memory does not grow
with their size.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from dsv4c.engine.format import (
    CHUNK_BYTES,
    FORMAT_VERSION,
    MAGIC,
    SECTION_ALIGN,
    ChunkHeader,
    Header,
    Section,
    SectionFlag,
    SectionType,
)
from dsv4c.engine.reader import table_digest
from dsv4c.errors import EngineFormatError

_EXTERNAL_NAME_BYTES = 64


@dataclass(frozen=True)
class EngineParts:
    """What goes into an engine besides the weights.

    `kernels` is the machine code, images one after the other; empty on a target whose kernels the runtime brings.
    Without it, or with `goldens` None, there is no such section.
    """

    arch: str
    manifest: Mapping[str, Any]
    plan: bytes
    tokenizer_files: Mapping[str, str]
    goldens: Mapping[str, Any] | None
    weight_bytes: int
    kernels: bytes = b""


def canonical_json(data: Mapping[str, Any]) -> bytes:
    """JSON whose bytes depend on the data alone."""
    return json.dumps(data, sort_keys=True, indent=1, ensure_ascii=False).encode() + b"\n"


def weights_name(engine: Path, chunk_digests: list[bytes]) -> str:
    """The name of an engine's external weights file.

    It tells the contents: an engine never opens with other weights than its own, and a build with new kernels leaves
    the weights file as it is.
    """
    return f"{engine.name}.{hashlib.sha256(b''.join(chunk_digests)).hexdigest()[:16]}.weights"


def _align(offset: int) -> int:
    return -(-offset // SECTION_ALIGN) * SECTION_ALIGN


def engine_size(parts: EngineParts) -> int:
    """An upper bound of the bytes that `write_engine` needs on disk, weights included."""
    small = [canonical_json(parts.manifest), parts.plan, parts.kernels, canonical_json(parts.tokenizer_files)]
    if parts.goldens is not None:
        small.append(canonical_json(parts.goldens))
    digests = ChunkHeader.LAYOUT.size + 32 * -(-parts.weight_bytes // CHUNK_BYTES)
    # One more page for the manifest, which grows by what is measured while the weights are written.
    return 2 * SECTION_ALIGN + sum(map(_align, map(len, small))) + _align(digests) + parts.weight_bytes


def check_space(path: Path, needed_bytes: int) -> None:
    """Raise EngineFormatError where the folder of `path` has less room than `needed_bytes`."""
    free = shutil.disk_usage(path.parent).free
    if free < needed_bytes:
        raise EngineFormatError(
            f"{path.parent} has {free / 1e9:.2f} GB free; the engine needs {needed_bytes / 1e9:.2f} GB",
            hint="free some space or choose another folder with -o",
        )


@contextlib.contextmanager
def _sealed(paths: list[Path]) -> Iterator[list[IO[bytes]]]:
    """Files beside `paths` that take their names, the first one last, when the block ends without an error.

    The block may replace entries of `paths`, but the first. What a killed build left is taken over; a file that is
    being written is refused.
    """
    partial = [path.with_name(f".{path.name}.partial") for path in paths]
    with contextlib.ExitStack() as stack:
        try:
            files = []
            for temporary in partial:
                # Before it exists: an interrupt may come at any moment.
                stack.callback(_discard, temporary)
                files.append(_locked(temporary, paths[0]))
                stack.callback(_close, files[-1])
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
            for temporary, path in reversed(list(zip(partial, paths, strict=True))):
                temporary.replace(path)
        except OSError as error:
            raise EngineFormatError(
                f"cannot write {paths[0]}: {error.strerror or error}",
                hint="check the free space and the folder's permissions",
            ) from error


def _discard(temporary: Path) -> None:
    """Remove a file that is half written, unless another process is writing it."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.unlink()


def _close(file: IO[bytes]) -> None:
    """Close a file whose contents do not matter any more: on a full disk the last flush fails again."""
    with contextlib.suppress(OSError):
        file.close()


def _locked(temporary: Path, path: Path) -> IO[bytes]:
    """An empty file at `temporary` that no other process is writing."""
    file = os.fdopen(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another build may have sealed this very file, under its own name, while we opened it.
        if not os.path.samestat(os.fstat(file.fileno()), temporary.stat()):
            raise BlockingIOError
        file.truncate()
    except BaseException as error:
        # Now: the error holds on to this frame, and the file to its lock.
        file.close()
        if not isinstance(error, BlockingIOError | FileNotFoundError):
            raise
        raise EngineFormatError(f"another build is writing {path}", hint="wait for it, or choose another -o") from None
    return file


class _SectionWriter:
    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.entries: list[Section] = []

    def add(self, kind: SectionType, data: bytes) -> None:
        self.entries.append(Section(kind, 0, self.start(), len(data), 0, hashlib.sha256(data).digest()))
        self.file.write(data)

    def reserve(self, size: int) -> int:
        """Leave room for a section that is written later; returns its offset."""
        offset = self.start()
        self.file.write(bytes(size))
        return offset

    def start(self) -> int:
        """Pad to the next section border; returns the offset."""
        offset = _align(self.file.tell())
        self.file.write(bytes(offset - self.file.tell()))
        return offset


def _stream_weights(file: IO[bytes], blocks: Iterable[bytes | memoryview], total: int) -> list[bytes]:
    """Write the weights and return the digest of each chunk."""
    digests, current, left = [], hashlib.sha256(), CHUNK_BYTES
    written = 0
    for block in blocks:
        view = memoryview(block)
        file.write(view)
        written += len(view)
        while len(view):
            taken = view[:left]
            current.update(taken)
            left -= len(taken)
            view = view[len(taken) :]
            if left == 0:
                digests.append(current.digest())
                current, left = hashlib.sha256(), CHUNK_BYTES
    if left != CHUNK_BYTES:
        digests.append(current.digest())
    assert written == total, f"weights are {written} bytes, the plan says {total}"
    return digests


def write_engine(
    path: Path,
    parts: EngineParts,
    weights: Iterable[bytes | memoryview],
    *,
    split_weights: bool = False,
    measured: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Write the engine `path`; `weights` yields the WEIGHTS bytes in order, gaps included.

    `measured` is asked once the weights are written; what it says joins the manifest.
    With `split_weights` they go to a file of their own beside it, which is sealed first. Raises EngineFormatError where
    there is no room or the file cannot be written; then nothing is left behind.
    """
    check_space(path, engine_size(parts))
    if not split_weights:
        with _sealed([path]) as (file,):
            _write(file, parts, weights, measured, path, None)
        return
    longest = len(weights_name(path, []).encode())
    if longest >= _EXTERNAL_NAME_BYTES:
        raise EngineFormatError(
            f"the name of the weights file would have {longest} bytes, more than {_EXTERNAL_NAME_BYTES - 1}",
            hint="choose a shorter engine name with -o",
        )
    paths = [path, path.with_name(path.name + ".weights")]
    with _sealed(paths) as (file, weights_out):
        paths[1] = path.with_name(_write(file, parts, weights, measured, path, weights_out))


def _write(
    file: IO[bytes],
    parts: EngineParts,
    weights: Iterable[bytes | memoryview],
    measured: Callable[[], Mapping[str, Any]],
    path: Path,
    external: IO[bytes] | None,
) -> str:
    """Write all sections; returns the name of the external weights file, empty where there is none."""
    count = 5 + bool(parts.kernels) + (parts.goldens is not None)
    file.write(bytes(Header.LAYOUT.size + count * Section.LAYOUT.size))
    sections = _SectionWriter(file)
    sections.add(SectionType.PLAN, parts.plan)
    if parts.kernels:
        sections.add(SectionType.KERNELS, parts.kernels)
    sections.add(SectionType.TOKENIZER, canonical_json(parts.tokenizer_files))
    chunk_count = -(-parts.weight_bytes // CHUNK_BYTES)
    chunks_size = ChunkHeader.LAYOUT.size + 32 * chunk_count
    chunks_offset = sections.reserve(chunks_size)
    weights_offset = sections.start() if external is None else 0
    digests = _stream_weights(external or file, weights, parts.weight_bytes)
    external_name = weights_name(path, digests) if external else ""
    # After the weights, whose errors it may tell.
    sections.add(SectionType.MANIFEST, canonical_json({**parts.manifest, **measured()}))
    if parts.goldens is not None:
        # Last in the file: they alone may differ between two builds of the same inputs.
        sections.add(SectionType.GOLDENS, canonical_json(parts.goldens))
    size = file.tell()
    header = ChunkHeader(1, 0, CHUNK_BYTES, chunk_count, parts.weight_bytes, external_name.encode(), b"")
    chunks = header.pack() + b"".join(digests)
    assert len(chunks) == chunks_size
    file.seek(chunks_offset)
    file.write(chunks)
    digest = hashlib.sha256(chunks).digest()
    flags = SectionFlag.EXTERNAL if external else SectionFlag(0)
    entries = [
        *sections.entries,
        Section(SectionType.CHUNKS, 0, chunks_offset, chunks_size, 0, digest),
        Section(SectionType.WEIGHTS, flags, weights_offset, parts.weight_bytes, 0, digest),
    ]
    _seal(file, parts.arch, sorted(entries, key=lambda e: e.type), size)
    return external_name


def _seal(file: IO[bytes], arch: str, entries: list[Section], size: int) -> None:
    table = b"".join(entry.pack() for entry in entries)
    unsealed = Header(MAGIC, FORMAT_VERSION, len(entries), size, arch.encode().ljust(16, b"\0"), 1, 0, bytes(16))
    file.seek(0)
    file.write(replace(unsealed, table_digest=table_digest(unsealed, table)).pack() + table)
