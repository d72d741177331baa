"""What it takes to run an engine: the driver, its weights and memory, a runtime that opens it."""

import bisect
import shlex
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsv4c.doctor.machine import available_bytes
from dsv4c.doctor.report import DEFAULT_TARGET, Check, Need, State, size_text
from dsv4c.engine.format import Bucket, SectionType
from dsv4c.engine.format import State as StatePlane
from dsv4c.engine.reader import EngineReader
from dsv4c.errors import EngineFormatError
from dsv4c.step_abi import StateKind

_RUNTIME_ARCHS = ("cpu", "sm_90a")  # what libdsv4c runs
_PLANE_ALIGN = 64  # as in runtime/src/session_state.cc


@dataclass(frozen=True)
class EngineMemory:
    """What a session of one slot takes, from the plan's records."""

    weight_bytes: int
    arena_bytes: int
    planes: tuple[tuple[bool, int], ...]  # (per block rather than per slot, bytes of one)
    block_tokens: int
    max_context: int

    @property
    def blocks(self) -> int:
        return -(-self.max_context // self.block_tokens)

    def state_bytes(self, blocks: int) -> int:
        sizes = (size * (blocks if per_block else 1) for per_block, size in self.planes)
        return sum(-(-size // _PLANE_ALIGN) * _PLANE_ALIGN for size in sizes)

    def total_bytes(self, blocks: int) -> int:
        return self.weight_bytes + self.arena_bytes + self.state_bytes(blocks)

    def largest_context(self, available_bytes: int) -> int:
        """Positions that fit; 0 where not even one block does."""
        fitting = bisect.bisect_right(range(1, self.blocks + 1), available_bytes, key=self.total_bytes)
        return min(fitting * self.block_tokens, self.max_context)


def engine_memory(reader: EngineReader) -> EngineMemory:
    """Raises EngineFormatError where the records are not where the header says."""
    plan, header = reader.section(SectionType.PLAN), reader.plan_header
    try:
        arenas = [
            Bucket.unpack(plan, header.buckets + index * Bucket.LAYOUT.size).arena_bytes
            for index in range(header.bucket_count)
        ]
        planes = [
            StatePlane.unpack(plan, header.states + index * StatePlane.LAYOUT.size)
            for index in range(header.state_count)
        ]
    except struct.error:
        raise EngineFormatError(f"{reader.path}: records lie outside section PLAN", hint="build it again") from None
    return EngineMemory(
        weight_bytes=reader.sections[SectionType.WEIGHTS].size,
        arena_bytes=max(arenas, default=0),
        planes=tuple((plane.kind == StateKind.BLOCK, plane.rows * plane.row_bytes) for plane in planes),
        block_tokens=max(1, header.block_tokens),
        max_context=header.max_context,
    )


def check_engine(
    reader: EngineReader, library: dict[str, Any], opened: dict[str, Any], driver: dict[str, Any]
) -> Iterator[Check]:
    """`library`, `opened` and `driver` are what the probes answered."""
    needs = frozenset({Need.RUN})
    header = reader.header
    facts = {
        "format_version": header.format_version,
        "file_bytes": header.file_size,
        "arch": reader.arch,
        "world_size": header.world_size,
        "rank": header.rank,
    }
    found = f"{reader.path}, format {header.format_version}, {size_text(header.file_size)}"
    yield Check("engine", State.OK, found, None, needs, facts)
    yield _arch(reader.arch)
    if header.world_size != 1:
        found = f"rank {header.rank} of {header.world_size}; this version runs engines of one rank"
        yield Check("ranks", State.MISSING, found, "build it for one rank", needs)
    try:
        yield _weights(reader)
        yield _memory(engine_memory(reader), _available(reader.arch, driver))
    except EngineFormatError as error:
        yield Check("plan", State.MISSING, error.message, error.hint, needs)
    if "error" in library:
        yield Check("opens", State.MISSING, "not tried: the library does not load", None, needs)
    elif "error" in opened:
        yield Check("opens", State.MISSING, opened["error"], opened.get("hint"), needs)
    else:
        found = f"yes; weights are not checked: that is `dsv4c verify {shlex.quote(str(reader.path))}`"
        yield Check("opens", State.OK, found, None, needs)


def _arch(arch: str) -> Check:
    needs = frozenset({Need.RUN})
    if arch in _RUNTIME_ARCHS:
        return Check("arch", State.OK, arch, None, needs)
    found = f"{arch}; this version runs engines for {', '.join(_RUNTIME_ARCHS)}"
    return Check("arch", State.MISSING, found, f"dsv4c build CHECKPOINT --target {DEFAULT_TARGET}", needs)


def _weights(reader: EngineReader) -> Check:
    needs = frozenset({Need.RUN})
    path, entry = reader.weights_path(), reader.sections[SectionType.WEIGHTS]
    if path == reader.path:
        return Check("weights", State.OK, f"{size_text(entry.size)} in the engine", None, needs)
    try:
        size = path.stat().st_size
    except OSError as error:
        found = f"{path}: {error.strerror}"
        return Check("weights", State.MISSING, found, f"copy {path.name} to the folder of the engine", needs)
    if size != entry.size:
        found = f"{path} is {size} bytes, the engine says {entry.size}"
        return Check("weights", State.MISSING, found, f"copy {path.name} again", needs)
    return Check("weights", State.OK, f"{size_text(size)} in {path}", None, needs)


def _available(arch: str, driver: dict[str, Any]) -> int | None:
    """Bytes that an engine of `arch` can have: the machine's, or those of the largest device that runs it."""
    if arch == DEFAULT_TARGET:
        return available_bytes()
    sizes = [device["memory_bytes"] for device in driver.get("devices", []) if _arch_of(device) == arch.rstrip("af")]
    return max(sizes, default=None)


def _memory(need: EngineMemory, available: int | None) -> Check:
    needs = frozenset({Need.RUN})
    full = need.total_bytes(need.blocks)
    facts = {
        "weight_bytes": need.weight_bytes,
        "arena_bytes": need.arena_bytes,
        "state_bytes": need.state_bytes(need.blocks),
        "context": need.max_context,
        "available_bytes": available,
    }
    found = (
        f"{size_text(full)} with {need.max_context:,} positions in one slot: weights {size_text(need.weight_bytes)}, "
        f"arena {size_text(need.arena_bytes)}, state {size_text(need.state_bytes(need.blocks))}"
    )
    if available is None or full <= available:
        return Check("needs", State.OK, found, None, needs, facts)
    context = need.largest_context(available)
    facts["largest_context"] = context
    found += f"; {size_text(available)} are available"
    if context:
        return Check("needs", State.WARNING, found, f"dsv4c run --context {context} fits", needs, facts)
    return Check("needs", State.MISSING, found, f"free {size_text(need.total_bytes(1) - available)}", needs, facts)


def check_driver(facts: dict[str, Any], arch: str | None) -> Check:
    """`arch` is that of the engine to run, if any."""
    found = _driver_text(facts)
    if arch is None or arch == DEFAULT_TARGET:
        return Check("driver", State.NOT_NEEDED, found, None, frozenset(), facts)
    needs = frozenset({Need.RUN})
    if arch.rstrip("af") not in map(_arch_of, facts.get("devices", [])):
        mend = "install the NVIDIA driver" if facts.get("absent") else f"run it on a machine with {arch}"
        return Check("driver", State.MISSING, f"{found}; the engine is for {arch}", mend, needs, facts)
    return Check("driver", State.OK, found, None, needs, facts)


def _driver_text(facts: dict[str, Any]) -> str:
    if facts.get("absent"):
        return "no NVIDIA driver"
    release, cuda = facts.get("driver_version"), facts.get("cuda_version")
    parts = [] if cuda is None else [f"NVIDIA driver {release + ' ' if release else ''}for CUDA {cuda}"]
    parts += [
        f"{device['name']} (compute capability {device['compute_capability']}, {device['sm_count']} SMs, "
        f"{size_text(device['memory_bytes'])})"
        for device in facts.get("devices", [])
    ]
    if "error" in facts:
        parts.append(f"libcuda.so.1: {facts['error']}")
    return "; ".join(parts)


def _arch_of(device: dict[str, Any]) -> str:
    return f"sm_{device['compute_capability'].replace('.', '')}"
