"""Damaged engines, at random: refused or run, never a crash, a hang or a read outside a mapping.

`make test-sanitize` runs this on a library that reports what else would go unnoticed. Where each kind of bad input of
the whole project is tested:

    checkpoint: overlapping or out-of-range extents, header of 2^63 bytes,
        invalid JSON or UTF-8, duplicate names, padding and key order       checkpoint/test_safetensors.py
    checkpoint: headers damaged at random                                   checkpoint/test_header_corruption.py
    checkpoint: scales that decode to NaN, NaN and infinite weights,
        ids that are no experts, an expert of zeros                         checkpoint/test_scan.py
    config that contradicts itself or the tensors (top-k above the experts,
        heads not divisible by o_groups), dialects that disagree            checkpoint/test_config.py, ...checkpoint.py
    engine: truncated at and around every section boundary                  here
    engine: records outside the arena or the file, overlapping sections,
        another version or arch                                             runtime/test_engine_file.py
    engine: damaged at random, with and without digests that fit            here
    engine: the reader without the library                                  here
    saved slots                                                             here, runtime/test_session.py
    a build without room, killed, or out of space in the middle             test_build_memory.py, engine/test_writer.py
"""

import hashlib
import os
import struct
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4c.engine.format import Arg, Header, PlanHeader, Record, Section, SectionType, Tensor
from dsv4c.engine.reader import read_engine
from dsv4c.errors import Dsv4cError, EngineFormatError, SessionError
from dsv4c.runtime.engine import Engine
from tests.model_cases import engine_of
from tests.runtime.hand_engine import hand_parts, seal, with_sections

DATA = seal(hand_parts())
EXAMPLES = settings(
    max_examples=int(os.environ.get("DSV4C_EXAMPLES", "150")),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
TABLES = ("entry_points", "buckets", "launches", "args", "tensors", "states", "kernels")
NUMBERS = st.one_of(
    st.integers(0, 70),
    st.sampled_from([2**k + d for k in (7, 8, 12, 16, 31, 32, 40, 62, 63, 64) for d in (-1, 0)]),
    st.integers(0, 2**64 - 1),
)


def sections(data: bytes) -> dict[SectionType, Section]:
    count = Header.unpack(data).section_count
    entries = [Section.unpack(data, Header.LAYOUT.size + i * Section.LAYOUT.size) for i in range(count)]
    return {SectionType(entry.type): entry for entry in entries}


def try_engine(path: Path) -> None:
    """Opens an engine and runs it, in both readers; whatever is refused must be refused as an error of dsv4c."""
    try:
        reader = read_engine(path)
        reader.verify_sections()
        reader.verify_weights()
        assert isinstance(reader.manifest, dict)
    except EngineFormatError:
        pass
    try:
        with (
            Engine.open(path, threads=1) as engine,
            engine.session(slots=2, context=min(24, engine.info.max_context)) as s,
        ):
            s.step([1, 2, 3, 4, 5, 6, 7, 8, 9], [0] * 9, list(range(9)))
            s.step([1, 2], [0, 1], [9, 0])
            s.restore(1, s.save(0))
            s.truncate(1, s.length(1) - 1)
    except (Dsv4cError, RuntimeError):
        pass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bad.dsv4c"


def test_truncated_around_every_section(path: Path) -> None:
    places = {0, 1, 7, 8, 63, 64, 65, len(DATA) - 1}
    for entry in sections(DATA).values():
        for edge in (entry.offset, entry.offset + entry.size):
            places |= {edge - 1, edge, edge + 1}
    table_end = Header.LAYOUT.size + len(sections(DATA)) * Section.LAYOUT.size
    places |= {table_end - 1, table_end, table_end + 1}
    for size in sorted(place for place in places if place < len(DATA)):
        for data in (DATA[:size], _claiming_its_size(DATA[:size])):
            path.write_bytes(data)
            for refuse in (Engine.open, lambda p: read_engine(p).verify_sections()):
                # A cut of the zeros at the end with a header that fits is a whole engine.
                if data[:16] != DATA[:16] or size < sections(DATA)[SectionType.WEIGHTS].offset + 2816:
                    with pytest.raises(EngineFormatError):
                        refuse(path)


def _claiming_its_size(data: bytes) -> bytes:
    """A truncated engine whose header and table digest fit the shorter file."""
    table_end = Header.LAYOUT.size + 6 * Section.LAYOUT.size
    if len(data) < table_end:
        return data
    header = replace(Header.unpack(data), file_size=len(data))
    return with_sections(header.pack() + data[Header.LAYOUT.size :])


@EXAMPLES
@given(st.data())
def test_flipped_bytes(path: Path, data: st.DataObject) -> None:
    damaged = bytearray(DATA)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(DATA) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    try_engine(path)


@EXAMPLES
@given(st.data())
def test_bytes_of_a_section_under_a_fitting_digest(path: Path, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([SectionType.MANIFEST, SectionType.PLAN, SectionType.CHUNKS, SectionType.GOLDENS]))
    entry = sections(DATA)[kind]
    damaged = bytearray(DATA)
    for _ in range(data.draw(st.integers(1, 3))):
        at = entry.offset + data.draw(st.integers(0, entry.size - 1))
        damaged[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(_resealed(bytes(damaged)))
    try_engine(path)


@EXAMPLES
@given(st.data())
def test_section_tables(path: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([kind.name for kind in sections(DATA)]))
    field = data.draw(st.sampled_from(["type", "flags", "offset", "size", "reserved"]))
    number = data.draw(NUMBERS) & (2**32 - 1 if field in ("type", "flags") else 2**64 - 1)
    path.write_bytes(_resealed(with_sections(DATA, **{name: {field: number}})))
    try_engine(path)


def _resealed(data: bytes) -> bytes:
    """Right digests of the sections and the table, whatever they hold."""
    changes: dict[str, dict[str, Any]] = {}
    try:
        for kind, entry in sections(data).items():
            if kind is not SectionType.WEIGHTS:
                digest = hashlib.sha256(data[entry.offset : entry.offset + entry.size]).digest()
                changes[kind.name] = {"sha256": digest}
        changes["WEIGHTS"] = dict(changes["CHUNKS"])
        return with_sections(data, **changes)
    except (ValueError, KeyError):
        return data


def _with_field(record: Record, name: str, number: int) -> Record:
    """A record with one field set to `number`, wrapped to what the field holds."""
    code = dict(zip([field.name for field in fields(record)], _codes(type(record)), strict=True))[name]
    number &= (1 << 8 * struct.calcsize(code)) - 1
    return replace(record, **{name: number - (1 << 64) if code == "q" and number >= 1 << 63 else number})


def _codes(record: type[Record]) -> list[str]:
    """The struct code of every field."""
    found = []
    count = ""
    for letter in record.LAYOUT.format.lstrip("<").replace(" ", ""):
        if letter.isdigit():
            count += letter
            continue
        if letter != "x":
            found += [letter] * int(count or 1)
        count = ""
    return found


@EXAMPLES
@given(st.data())
def test_records_of_the_plan(path: Path, data: st.DataObject) -> None:
    parts = hand_parts()
    for _ in range(data.draw(st.integers(1, 2))):
        table = data.draw(st.sampled_from(TABLES))
        records: list[Record] = getattr(parts, table)
        index = data.draw(st.integers(0, len(records) - 1))
        name = data.draw(st.sampled_from([field.name for field in fields(records[index])]))
        records[index] = _with_field(records[index], name, data.draw(NUMBERS))
    path.write_bytes(seal(parts))
    try_engine(path)


@EXAMPLES
@given(st.data())
def test_fields_of_the_plan_header(path: Path, data: st.DataObject) -> None:
    parts = hand_parts()
    names = [field.name for field in fields(PlanHeader) if field.name != "bos_token_id"]
    name = data.draw(st.sampled_from(names))
    parts.plan_header[name] = data.draw(NUMBERS) & (2**32 - 1)
    path.write_bytes(seal(parts))
    try_engine(path)


@EXAMPLES
@given(st.data())
def test_weights_of_any_bytes(path: Path, data: st.DataObject) -> None:
    """Whatever the weights hold, a step ends: their digests are not checked on opening."""
    parts = hand_parts()
    noise = np.random.default_rng(data.draw(st.integers(0, 2**32))).bytes(len(parts.weights))
    parts.weights = bytearray(noise)
    path.write_bytes(seal(parts))
    try_engine(path)


@dataclass(frozen=True)
class ModelEngine:
    """An engine of a whole model, as bytes; the hand-made one has a few kernels only."""

    data: bytes
    plan: PlanHeader
    plan_at: int

    def with_plan_bytes(self, at: int, new: bytes) -> bytes:
        at += self.plan_at
        return _resealed(self.data[:at] + new + self.data[at + len(new) :])


@pytest.fixture(scope="module", params=["exact", "reference"])
def model(request: pytest.FixtureRequest) -> ModelEngine:
    data = engine_of("narrow", "fp8_fp4", request.param).read_bytes()
    at = sections(data)[SectionType.PLAN].offset
    return ModelEngine(data, PlanHeader.unpack(data, at), at)


@EXAMPLES
@given(st.data())
def test_tensors_and_arguments_of_a_model(path: Path, model: ModelEngine, data: st.DataObject) -> None:
    record, start, count = data.draw(
        st.sampled_from(
            [
                (Tensor, model.plan.tensors, model.plan.tensor_count),
                (Tensor, model.plan.tensors, model.plan.tensor_count),
                (Arg, model.plan.args, model.plan.arg_count),
            ]
        )
    )
    index = data.draw(st.integers(0, count - 1))
    at = start + index * record.LAYOUT.size
    old = record.unpack(model.data, model.plan_at + at)
    names = [field.name for field in fields(old) if field.name != "reserved"]
    name = data.draw(st.sampled_from(names))
    # Most often a number that is near, or one of another record: those pass the checks of a record by itself.
    near = getattr(old, name) + data.draw(st.integers(-2, 2))
    other = getattr(
        record.unpack(model.data, model.plan_at + start + data.draw(st.integers(0, count - 1)) * record.LAYOUT.size),
        name,
    )
    number = data.draw(st.sampled_from([near, other, 2 * near, data.draw(NUMBERS)]))
    path.write_bytes(model.with_plan_bytes(at, _with_field(old, name, number).pack()))
    try_engine(path)


@EXAMPLES
@given(st.data())
def test_weights_of_a_model(path: Path, model: ModelEngine, data: st.DataObject) -> None:
    entry = sections(model.data)[SectionType.WEIGHTS]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    damaged = bytearray(model.data)
    start = data.draw(st.integers(0, entry.size - 1))
    size = data.draw(st.integers(1, entry.size - start))
    damaged[entry.offset + start : entry.offset + start + size] = rng.bytes(size)
    path.write_bytes(damaged)
    try_engine(path)


@EXAMPLES
@given(st.data())
def test_saved_slots(engine: Engine, data: st.DataObject) -> None:
    with engine.session(slots=2) as session:
        session.step([1] * 9, [0] * 9, list(range(9)))
        saved = bytearray(session.save(0))
        for _ in range(data.draw(st.integers(1, 3))):
            saved[data.draw(st.integers(0, len(saved) - 1))] ^= data.draw(st.integers(1, 255))
        del saved[data.draw(st.integers(len(saved) - 2, len(saved))) :]
        try:
            session.restore(1, bytes(saved))
        except SessionError:
            assert session.length(1) == 0
        at = session.length(1)
        session.step([5, 6], [1, 1], [at, at + 1])
