"""Reading an engine file without the runtime library: header, sections, manifest, digests.

Standard library and `errors` only. Nothing is used before it is checked; weights are never loaded whole.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dsv4c.engine.format import (
    MAGIC,
    READABLE_VERSIONS,
    SECTION_ALIGN,
    ChunkHeader,
    Header,
    PlanHeader,
    Section,
    SectionFlag,
    SectionType,
)
from dsv4c.errors import EngineFormatError

_REBUILD = "the file is damaged or incomplete; build it again"
_DIGEST_BYTES = 32
# More sections than any version has: a damaged count must not make us read gigabytes.
_MAX_SECTIONS = 64
# No section but the weights comes near: the digests of 320 GB of weights take 2.5 MB.
_MAX_SECTION_BYTES = 1 << 30
_READ_BYTES = 1 << 20


def table_digest(header: Header, table: bytes) -> bytes:
    """What `Header.table_digest` must hold: it covers the header before it, and the section table."""
    return hashlib.sha256(header.pack()[: -len(header.table_digest)] + table).digest()[: len(header.table_digest)]


@dataclass(frozen=True)
class EngineReader:
    """An engine whose header and section table are checked; sections are checked when read."""

    path: Path
    header: Header
    sections: dict[SectionType, Section]

    @property
    def arch(self) -> str:
        return self.header.arch.rstrip(b"\0").decode("ascii", "replace")

    def has(self, kind: SectionType) -> bool:
        return kind in self.sections

    def section(self, kind: SectionType) -> bytes:
        """The bytes of a section other than WEIGHTS; raises EngineFormatError where its digest does not match."""
        entry = self.sections.get(kind)
        if entry is None:
            raise EngineFormatError(f"{self.path} has no {kind.name} section", hint=_REBUILD)
        assert kind is not SectionType.WEIGHTS, "weights are read by chunks"
        try:
            with self.path.open("rb") as file:
                file.seek(entry.offset)
                data = file.read(entry.size)
        except OSError as error:
            raise EngineFormatError(f"cannot read {self.path}: {error.strerror}") from None
        if hashlib.sha256(data).digest() != entry.sha256:
            raise EngineFormatError(f"{self.path}: section {kind.name} does not match its digest", hint=_REBUILD)
        return data

    @property
    def manifest(self) -> dict[str, Any]:
        return self._json(SectionType.MANIFEST)

    @property
    def goldens(self) -> dict[str, Any] | None:
        return self._json(SectionType.GOLDENS) if self.has(SectionType.GOLDENS) else None

    @property
    def tokenizer_files(self) -> dict[str, str]:
        return self._json(SectionType.TOKENIZER) if self.has(SectionType.TOKENIZER) else {}

    def _json(self, kind: SectionType) -> dict[str, Any]:
        try:
            data = json.loads(self.section(kind))
        except (ValueError, RecursionError) as error:
            raise EngineFormatError(f"{self.path}: section {kind.name} is not JSON ({error})", hint=_REBUILD) from None
        if not isinstance(data, dict):
            raise EngineFormatError(f"{self.path}: section {kind.name} is not a JSON object", hint=_REBUILD)
        return data

    @property
    def plan_header(self) -> PlanHeader:
        data = self.section(SectionType.PLAN)
        if len(data) < PlanHeader.LAYOUT.size:
            raise EngineFormatError(f"{self.path}: section PLAN is {len(data)} bytes, too short", hint=_REBUILD)
        return PlanHeader.unpack(data)

    @property
    def chunks(self) -> ChunkHeader:
        return self._chunks()[0]

    def _chunks(self) -> tuple[ChunkHeader, bytes]:
        """The header of CHUNKS, checked against the section table, and the digests after it."""
        data = self.section(SectionType.CHUNKS)
        if len(data) < ChunkHeader.LAYOUT.size:
            raise EngineFormatError(f"{self.path}: section CHUNKS is {len(data)} bytes, too short", hint=_REBUILD)
        header, digests = ChunkHeader.unpack(data), data[ChunkHeader.LAYOUT.size :]
        weights = self.sections[SectionType.WEIGHTS]
        if (
            header.total_bytes != weights.size
            or header.chunk_bytes == 0
            or header.chunk_count != -(-header.total_bytes // header.chunk_bytes)
            or len(digests) != header.chunk_count * _DIGEST_BYTES
        ):
            raise EngineFormatError(
                f"{self.path}: CHUNKS have {len(digests)} bytes of digests for {header.chunk_count} chunks of "
                f"{header.chunk_bytes} bytes, WEIGHTS have {weights.size} bytes",
                hint=_REBUILD,
            )
        return header, digests

    @property
    def digest(self) -> str:
        """The reproducible digest: every section but the goldens, which depend on the machine that made them."""
        covered = [e.sha256 for kind, e in sorted(self.sections.items()) if kind is not SectionType.GOLDENS]
        return hashlib.sha256(b"".join(covered)).hexdigest()

    def weights_path(self) -> Path:
        """The file that holds the weights: this one, or the external one beside it."""
        if self.sections[SectionType.WEIGHTS].flags & SectionFlag.EXTERNAL:
            name = self.chunks.external_name.rstrip(b"\0").decode(errors="surrogateescape")
            # A file beside the engine: no way to another folder.
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise EngineFormatError(
                    f"{self.path}: CHUNKS do not name a weights file beside the engine (found {name!r})", hint=_REBUILD
                )
            return self.path.parent / name
        return self.path

    def weight_bytes(self, offset: int, size: int) -> bytes:
        """A few bytes of WEIGHTS as they lie, not compared with a digest: that takes a whole chunk."""
        path, entry = self.weights_path(), self.sections[SectionType.WEIGHTS]
        if offset < 0 or size < 0 or offset + size > entry.size:
            raise EngineFormatError(f"{self.path}: bytes {offset} to {offset + size} are not in WEIGHTS", hint=_REBUILD)
        try:
            with path.open("rb") as file:
                file.seek(entry.offset + offset)
                data = file.read(size)
        except OSError as error:
            raise EngineFormatError(
                f"cannot read {path}: {error.strerror}", hint="keep the engine and its weights file in one folder"
            ) from None
        if len(data) != size:
            raise EngineFormatError(f"{path} ends within the weights", hint=_REBUILD)
        return data

    def verify_sections(self) -> None:
        """Check the digest of every section but the weight chunks."""
        for kind in self.sections:
            if kind is not SectionType.WEIGHTS:
                self.section(kind)

    def verify_weights(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Check every weight chunk; raises EngineFormatError naming the first that differs."""
        header, digests = self._chunks()
        for index, digest in enumerate(self._chunk_digests(header)):
            start = index * _DIGEST_BYTES
            if digest != digests[start : start + _DIGEST_BYTES]:
                first = index * header.chunk_bytes
                raise EngineFormatError(
                    f"{self.weights_path()}: weight chunk {index} (bytes {first} to "
                    f"{min(first + header.chunk_bytes, header.total_bytes)} of the weights) does not match its digest",
                    hint=_REBUILD,
                )
            if progress is not None:
                progress(index + 1, header.chunk_count)

    def _chunk_digests(self, header: ChunkHeader) -> Iterator[bytes]:
        path = self.weights_path()
        entry = self.sections[SectionType.WEIGHTS]
        if not path.is_file():
            raise EngineFormatError(
                f"{path} is missing: the weights of {self.path.name} are in that file",
                hint="keep the engine and its weights file in one folder",
            )
        try:
            with path.open("rb") as file:
                file.seek(entry.offset)
                left = header.total_bytes
                while left:
                    wanted = min(header.chunk_bytes, left)
                    yield self._digest_of(file, wanted)
                    left -= wanted
        except OSError as error:
            raise EngineFormatError(f"cannot read {path}: {error.strerror}") from None

    def _digest_of(self, file: IO[bytes], size: int) -> bytes:
        """The digest of the next `size` bytes, which a chunk size may make many."""
        digest = hashlib.sha256()
        while size:
            data = file.read(min(size, _READ_BYTES))
            if not data:
                raise EngineFormatError(f"{file.name} ends within the weights", hint=_REBUILD)
            digest.update(data)
            size -= len(data)
        return digest.digest()


def is_engine(path: Path) -> bool:
    """Whether a file starts like an engine."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_engine(path: Path) -> EngineReader:
    """Open an engine file of any target; checks header, table and section bounds.

    Raises EngineFormatError (what is wrong, and where) on anything that is not a whole engine this version reads.
    """
    try:
        # Before opening it: that would wait on a pipe.
        if path.exists() and not path.is_file():
            raise EngineFormatError(f"{path} is not a regular file", hint="name the engine file")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            head = file.read(Header.LAYOUT.size)
            header = _header(path, head, size)
            table = file.read(header.section_count * Section.LAYOUT.size)
    except OSError as error:
        raise EngineFormatError(f"cannot read {path}: {error.strerror}") from None
    if len(table) != header.section_count * Section.LAYOUT.size:
        raise EngineFormatError(f"{path} ends within its section table", hint=_REBUILD)
    if table_digest(header, table) != header.table_digest:
        raise EngineFormatError(f"{path}: header or section table does not match its digest", hint=_REBUILD)
    return EngineReader(path, header, _sections(path, table, size))


def _header(path: Path, head: bytes, size: int) -> Header:
    if head[: len(MAGIC)] != MAGIC:
        raise EngineFormatError(f"{path} is not a dsv4c engine", hint="build one with `dsv4c build`")
    if len(head) < Header.LAYOUT.size:
        raise EngineFormatError(f"{path} is {size} bytes, shorter than an engine header", hint=_REBUILD)
    header = Header.unpack(head)
    if header.format_version not in READABLE_VERSIONS:
        readable = ", ".join(map(str, READABLE_VERSIONS))
        raise EngineFormatError(
            f"{path} has format version {header.format_version}; this dsv4c reads {readable}",
            hint="use the dsv4c version that built it, or build the engine again",
        )
    if header.file_size != size:
        raise EngineFormatError(f"{path} is {size} bytes, its header says {header.file_size}", hint=_REBUILD)
    if not 0 < header.section_count <= _MAX_SECTIONS:
        raise EngineFormatError(f"{path} declares {header.section_count} sections", hint=_REBUILD)
    return header


def _sections(path: Path, table: bytes, size: int) -> dict[SectionType, Section]:
    sections: dict[SectionType, Section] = {}
    end = Header.LAYOUT.size + len(table)
    entries = [Section.unpack(table, at) for at in range(0, len(table), Section.LAYOUT.size)]
    for entry in sorted(entries, key=lambda e: (e.offset, e.size)):
        try:
            kind = SectionType(entry.type)
        except ValueError:
            raise EngineFormatError(f"{path} has a section of unknown type {entry.type}", hint=_REBUILD) from None
        if kind in sections:
            raise EngineFormatError(f"{path} has two {kind.name} sections", hint=_REBUILD)
        sections[kind] = entry
        if kind is SectionType.WEIGHTS and entry.flags == SectionFlag.EXTERNAL and entry.offset == 0:
            continue
        if entry.flags or entry.reserved:
            raise EngineFormatError(f"{path}: section {kind.name} has unknown flags", hint=_REBUILD)
        if kind is not SectionType.WEIGHTS and entry.size > _MAX_SECTION_BYTES:
            raise EngineFormatError(f"{path}: section {kind.name} is {entry.size} bytes", hint=_REBUILD)
        if entry.offset % SECTION_ALIGN or entry.offset < end or entry.offset + entry.size > size:
            raise EngineFormatError(f"{path}: section {kind.name} lies outside the file or overlaps", hint=_REBUILD)
        end = entry.offset + entry.size
    for kind in (SectionType.MANIFEST, SectionType.PLAN, SectionType.CHUNKS, SectionType.WEIGHTS):
        if kind not in sections:
            raise EngineFormatError(f"{path} has no {kind.name} section", hint=_REBUILD)
    if sections[SectionType.WEIGHTS].sha256 != sections[SectionType.CHUNKS].sha256:
        raise EngineFormatError(f"{path}: the digest of WEIGHTS is not that of CHUNKS", hint=_REBUILD)
    return sections
