"""Opening engines: what a good one says, and that a damaged one is refused with a message that names the damage."""

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4c.engine.format import NO_INDEX, SECTION_ALIGN, ChunkHeader, Header, Section, SectionType
from dsv4c.errors import EngineFormatError
from dsv4c.runtime.engine import Engine
from dsv4c.step_abi import Dim, Input, Output, Space
from tests.runtime.hand_engine import (
    CHUNK,
    CONTEXT,
    EOS,
    ROLLBACK,
    VOCAB,
    WIDTH,
    Parts,
    hand_parts,
    seal,
    with_sections,
    write_engine,
)

DATA = seal(hand_parts())


def sections(data: bytes) -> dict[str, Section]:
    header = Header.unpack(data)
    offsets = [Header.LAYOUT.size + i * Section.LAYOUT.size for i in range(header.section_count)]
    entries = [Section.unpack(data, offset) for offset in offsets]
    return {SectionType(entry.type).name: entry for entry in entries}


def flip(data: bytes, offset: int, bit: int = 0) -> bytes:
    return data[:offset] + bytes([data[offset] ^ 1 << bit]) + data[offset + 1 :]


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., EngineFormatError]:
    def check(data: bytes, match: str) -> EngineFormatError:
        path = tmp_path / "bad.dsv4c"
        path.write_bytes(data)
        before = sorted(os.listdir(tmp_path))
        with pytest.raises(EngineFormatError, match=match) as caught:
            Engine.open(path)
        assert str(path) in caught.value.message
        assert caught.value.hint
        assert sorted(os.listdir(tmp_path)) == before
        return caught.value

    return check


def test_info_and_sections(engine: Engine) -> None:
    info = engine.info
    assert (info.arch, info.vocab_size, info.max_context, info.layer_count) == ("cpu", VOCAB, CONTEXT, 1)
    assert (info.hidden_size, info.rollback_rows, info.world_size, info.rank) == (WIDTH, ROLLBACK, 1, 0)
    assert (info.bos_token_id, info.eos_token_ids, info.threads) == (1, (EOS,), 2)
    assert engine.manifest() == {"model": "hand-made"}
    assert engine.tokenizer_files() == {"tokenizer.json": "{}"}
    assert engine.goldens() == {"prompts": []}


def test_optional_parts(tmp_path: Path) -> None:
    parts = hand_parts()
    parts.eos_ids = []
    parts.plan_header["bos_token_id"] = NO_INDEX
    path = tmp_path / "small.dsv4c"
    path.write_bytes(seal(parts, omit=(SectionType.TOKENIZER, SectionType.GOLDENS)))
    with Engine.open(path) as engine:
        assert engine.info.bos_token_id is None and engine.info.eos_token_ids == ()
        assert engine.tokenizer_files() == {} and engine.goldens() is None


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(EngineFormatError, match=r"cannot open engine .*: No such file"):
        Engine.open(tmp_path / "none.dsv4c")
    with pytest.raises(EngineFormatError, match="is not a regular file"):
        Engine.open(tmp_path)


@pytest.mark.parametrize(
    ("size", "match"),
    [
        (0, "not an engine file"),
        (5, "not an engine file"),
        (8, "engine is 8 bytes, shorter than its 64-byte header"),
        (63, "engine is 63 bytes, shorter"),
        (64, f"engine is 64 bytes, its header says {len(DATA)}"),
        (200, "engine is 200 bytes"),
        (SECTION_ALIGN, "engine is 4096 bytes"),
        (len(DATA) - 1, f"engine is {len(DATA) - 1} bytes, its header says {len(DATA)}"),
    ],
)
def test_truncated(refused: Callable[..., EngineFormatError], size: int, match: str) -> None:
    refused(DATA[:size], match)


def test_longer_than_its_header_says(refused: Callable[..., EngineFormatError]) -> None:
    refused(DATA + b"x", "its header says")


def test_wrong_magic(refused: Callable[..., EngineFormatError]) -> None:
    refused(b"GGUF" + DATA[4:], "not an engine file: it does not begin with DSV4CENG")


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"format_version": 7}, "engine has format version 7; this runtime reads 1"),
        ({"arch": b"npu"}, "engine is for npu, this runtime runs cpu and GPUs of NVIDIA"),
        ({"world_size": 2}, "engine is one of 2 ranks"),
        ({"rank": 1}, "engine says rank 1 of 1"),
    ],
)
def test_for_another_runtime(refused: Callable[..., EngineFormatError], header: dict[str, Any], match: str) -> None:
    parts = hand_parts()
    parts.header = header
    refused(seal(parts), match)


def test_one_flipped_byte_in_header_or_table(refused: Callable[..., EngineFormatError]) -> None:
    for offset in range(Header.LAYOUT.size + Header.unpack(DATA).section_count * Section.LAYOUT.size):
        refused(flip(DATA, offset, offset % 8), "engine|section table")


@pytest.mark.parametrize("name", ["MANIFEST", "PLAN", "TOKENIZER", "GOLDENS", "CHUNKS"])
def test_one_flipped_byte_in_a_section(refused: Callable[..., EngineFormatError], name: str) -> None:
    entry = sections(DATA)[name]
    for offset in (0, entry.size // 2, entry.size - 1):
        refused(flip(DATA, entry.offset + offset), f"section {name} does not match its digest")


def test_one_flipped_byte_in_the_weights(tmp_path: Path) -> None:
    entry = sections(DATA)["WEIGHTS"]
    path = tmp_path / "bad.dsv4c"
    for chunk in (0, 2, (entry.size - 1) // CHUNK):
        path.write_bytes(flip(DATA, entry.offset + chunk * CHUNK))
        last = min((chunk + 1) * CHUNK, entry.size) - 1
        with (
            Engine.open(path) as engine,
            pytest.raises(
                EngineFormatError, match=rf"weight chunk {chunk} \(bytes {chunk * CHUNK} to {last} of WEIGHTS\)"
            ),
        ):
            engine.verify_weights()


def test_one_flipped_byte_in_the_padding(refused: Callable[..., EngineFormatError]) -> None:
    entry = sections(DATA)["WEIGHTS"]
    refused(flip(DATA, sections(DATA)["PLAN"].offset - 1), "padding before section PLAN is not zero")
    refused(flip(DATA, entry.offset + entry.size), "bytes after section WEIGHTS are not zero")
    refused(flip(DATA, SECTION_ALIGN - 1), "padding before section MANIFEST is not zero")


def test_sizes_that_would_take_hours(tmp_path: Path) -> None:
    """A file of holes: neither its padding nor its sections are read through."""
    path = tmp_path / "sparse.dsv4c"
    size = 1 << 40
    for changes, match in (
        ({}, "bytes after section WEIGHTS belong to no section"),
        ({"WEIGHTS": {"offset": 1 << 39}}, "section WEIGHTS does not follow CHUNKS"),
        ({"WEIGHTS": {"offset": 1 << 39}, "CHUNKS": {"size": 1 << 38}}, "section CHUNKS is 274877906944 bytes, more"),
    ):
        data = replace(Header.unpack(DATA), file_size=size).pack() + DATA[Header.LAYOUT.size :]
        path.write_bytes(with_sections(data, **changes))
        os.truncate(path, size)
        with pytest.raises(EngineFormatError, match=match):
            Engine.open(path)


PLAN_AT = sections(DATA)["PLAN"].offset


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"PLAN": {"offset": SECTION_ALIGN}}, "section PLAN overlaps MANIFEST"),
        ({"MANIFEST": {"offset": 0}}, "section MANIFEST overlaps the section table"),
        ({"PLAN": {"offset": PLAN_AT + 64}}, f"section PLAN begins at {PLAN_AT + 64}, not on a 4096-byte boundary"),
        ({"PLAN": {"size": len(DATA)}}, "section PLAN .* lies outside the engine"),
        ({"PLAN": {"size": 2**64 - 4096}}, "section PLAN .* lies outside the engine"),
        ({"PLAN": {"offset": 2**64 - 4096}}, "section PLAN .* lies outside the engine"),
        ({"PLAN": {"type": 9}}, "section 1 has unknown type 9"),
        ({"PLAN": {"type": 0}}, "section 1 has unknown type 0"),
        ({"PLAN": {"type": SectionType.MANIFEST}}, "engine has two MANIFEST sections"),
        ({"PLAN": {"flags": 1}}, "section PLAN has unknown flags 1"),
        ({"WEIGHTS": {"flags": 2}}, "section WEIGHTS has unknown flags 2"),
        ({"WEIGHTS": {"flags": 1}}, "external WEIGHTS have offset"),
        ({"PLAN": {"reserved": 1}}, "reserved field of section PLAN is not zero"),
        ({"WEIGHTS": {"size": 64}}, "CHUNKS cover 2816 bytes, WEIGHTS have 64|bytes after section"),
        ({"WEIGHTS": {"sha256": bytes(32)}}, "the weights belong to another engine"),
    ],
)
def test_bad_section_table(
    refused: Callable[..., EngineFormatError], changes: dict[str, dict[str, Any]], match: str
) -> None:
    refused(with_sections(DATA, **changes), match)


@pytest.mark.parametrize("kind", [SectionType.MANIFEST, SectionType.PLAN, SectionType.CHUNKS, SectionType.WEIGHTS])
def test_missing_section(refused: Callable[..., EngineFormatError], kind: SectionType) -> None:
    refused(seal(hand_parts(), omit=(kind,)), f"engine has no {kind.name} section")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"chunk_bytes": 0}, "chunks of 0 bytes"),
        ({"chunk_count": 3}, "CHUNKS have 3 chunks, expected 6"),
        ({"chunk_bytes": 1024}, "CHUNKS have 6 chunks, expected 3"),
        ({"total_bytes": 100}, "CHUNKS cover 100 bytes"),
        ({"rank": 3}, "CHUNKS are of rank 3 of 1"),
        ({"external_name": b"weights.bin"}, "CHUNKS name the weights file weights.bin"),
    ],
)
def test_bad_chunk_header(refused: Callable[..., EngineFormatError], changes: dict[str, Any], match: str) -> None:
    parts = hand_parts()
    parts.chunk_header = changes
    refused(seal(parts), match)


def test_chunks_without_their_digests(refused: Callable[..., EngineFormatError]) -> None:
    entry = sections(DATA)["CHUNKS"]
    size = ChunkHeader.LAYOUT.size + 32
    digest = hashlib.sha256(DATA[entry.offset : entry.offset + size]).digest()
    data = DATA[: entry.offset + size] + bytes(entry.size - size) + DATA[entry.offset + entry.size :]
    changes = {"size": size, "sha256": digest}
    refused(with_sections(data, CHUNKS=changes, WEIGHTS={"sha256": digest}), "which is not 6 digests")


def test_external_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = hand_parts()
    parts.external_name = "hand.weights"
    path = write_engine(tmp_path / "hand.dsv4c", parts)
    with pytest.raises(EngineFormatError, match=r"cannot open weights file .*hand\.weights: No such file"):
        Engine.open(path)
    weights = tmp_path / "hand.weights"
    weights.write_bytes(parts.weights[:-1])
    with pytest.raises(EngineFormatError, match=r"weights file hand\.weights is 2815 bytes, the engine says 2816"):
        Engine.open(path)
    weights.write_bytes(parts.weights)
    monkeypatch.chdir(tmp_path)
    for name in (path, Path("hand.dsv4c")):
        with Engine.open(name) as engine, engine.session() as session:
            engine.verify_weights()
            assert session.step([1], [0], [0]).shape == (1, VOCAB)
    weights.write_bytes(flip(bytes(parts.weights), 600))
    with Engine.open(path) as engine, pytest.raises(EngineFormatError, match="weight chunk 1 "):
        engine.verify_weights()


@pytest.mark.parametrize("name", ["../hand.weights", "..", "a/b"])
def test_external_weights_elsewhere(refused: Callable[..., EngineFormatError], name: str) -> None:
    parts = hand_parts()
    parts.external_name = name
    refused(seal(parts), f'do not name a weights file beside the engine.*"{re.escape(name)}"')


def _edit(table: str, index: int, **changes: Any) -> Callable[[Parts], None]:
    return lambda parts: parts.edit(table, index, **changes)


def _header(**changes: Any) -> Callable[[Parts], None]:
    return lambda parts: parts.plan_header.update(changes)


def _edit_tensor(space: Space, index: int = 0, /, **changes: Any) -> Callable[[Parts], None]:
    return lambda parts: parts.edit("tensors", parts.tensor_index(space, index), **changes)


def _unknown_kernel(parts: Parts) -> None:
    parts.kernels[1] = replace(parts.kernels[1], name=parts.string("magic"))


def _unterminated_strings(parts: Parts) -> None:
    parts.strings += b"x"


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (_header(plan_version=2), "plan has version 2; this runtime reads 1"),
        (_header(rank=1), "plan is of rank 1 of 1"),
        (_header(weight_bytes=1), "plan expects 1 bytes of weights, WEIGHTS have 2816"),
        (_header(vocab_size=0), "vocabulary of 0 tokens"),
        (_header(vocab_size=2**31), "vocabulary of"),
        (_header(vocab_size=VOCAB - 1), "has not the shape and dtype of"),
        (_header(max_context=0), "context of 0 positions"),
        (_header(block_tokens=0), "blocks of 0 tokens"),
        (_header(bos_token_id=VOCAB), "begin token 40 is outside the vocabulary of 40"),
        (lambda parts: parts.eos_ids.append(VOCAB), "end token 40 is outside the vocabulary"),
        (_header(args=2**63), "table args .* lies outside the section"),
        (_header(launch_count=2**61), "table launches .* lies outside the section"),
        (_header(tensor_count=10**6), "table tensors .* lies outside the section"),
        (_header(strings_bytes=0), "strings do not end with a zero"),
        (_unterminated_strings, "strings do not end with a zero"),
        (_unknown_kernel, "engine needs kernel magic, which this runtime does not have"),
        (_edit("entry_points", 0, bucket_count=9), "entry point 0 has buckets 0 to 9 of 3"),
        (_edit("entry_points", 0, name=1), "plan has no entry point main"),
        (_edit("entry_points", 0, bucket_count=1), "entry point main has no mixed bucket"),
        (_edit("buckets", 0, kind=3), "bucket 0 has unknown kind 3"),
        (_edit("buckets", 0, tokens=0), "bucket 0 has a capacity of 0 tokens"),
        (_edit("buckets", 1, tokens=5), "lies outside the arena of"),
        (_edit("buckets", 2, arena_bytes=64), "lies outside the arena of 64 bytes"),
        (_edit("buckets", 0, first_launch=NO_INDEX), "bucket 0 has launches"),
        (_edit("buckets", 0, launch_count=10**6), "bucket 0 has launches 0 to 1000000 of 21"),
        (_edit("launches", 3, kernel=100), "launch 3 has kernel 100 of 7"),
        (_edit("launches", 3, name=10**6), "the name of launch 3 lies outside the strings"),
        (_edit("launches", 3, first_arg=10**6), "launch 3 has arguments"),
        (_edit("launches", 0, output_count=9), "launch 0 has 9 outputs among 4 arguments"),
        (_edit("launches", 0, output_count=2), "output 2 of launch 0 is not a tensor"),
        (_edit("launches", 5, flags=0), "is not flagged so"),
        (_edit("launches", 6, flags=1), "is not flagged so"),
        (_edit("args", 0, kind=8), "argument 0 of launch 0 has unknown kind 8"),
        (_edit("args", 0, value=-1), "argument 0 of launch 0 is tensor -1 of"),
        (_edit("args", 0, value=10**9), "argument 0 of launch 0 is tensor 1000000000 of"),
        (_edit("args", 3, value=1), "launch 0 .* writes to memory that is read-only"),
        (_edit("states", 0, kind=5), "state plane ring has unknown kind 5"),
        (_edit("states", 0, row_bytes=0), "state plane ring has 7 rows of 0 bytes"),
        (_edit("states", 0, row_bytes=2**62), "state plane ring has 7 rows of"),
        (_edit("states", 0, row_bytes=28), "strides over state plane ring by 56 elements, a slot has 196 bytes"),
        (_edit("states", 2, ratio=0), "state plane entries has 2 rows a block"),
        (_edit("states", 2, rows=1), "state plane entries has 1 rows a block"),
        (_edit("states", 2, name=NO_INDEX), "the name of state plane 2 lies outside the strings"),
        (_edit_tensor(Space.ARENA, space=6), "that its space 6 cannot have"),
        (_edit_tensor(Space.ARENA, dtype=11), "has unknown dtype 11"),
        (_edit_tensor(Space.ARENA, ndim=5), "has 5 dimensions"),
        (_edit_tensor(Space.ARENA, dim_0=6), "has unknown dimension 6"),
        (_edit_tensor(Space.ARENA, dim_0=Dim.BLOCKS), "that its space 1 cannot have"),
        (_edit_tensor(Space.ARENA, offset=1), "is misaligned: offset 1"),
        (_edit_tensor(Space.ARENA, offset=2**64 - 64), "lies outside the arena"),
        (_edit_tensor(Space.ARENA, size_1=2**62), "lies outside the arena"),
        (_edit_tensor(Space.ARENA, stride_0=2**62), "lies outside the arena"),
        (_edit_tensor(Space.ARENA, stride_0=-8), "has a stride of -8"),
        (_edit_tensor(Space.WEIGHT, size_0=VOCAB * 100), "lies outside the 2816 bytes of WEIGHTS"),
        (_edit_tensor(Space.WEIGHT, offset=2816), "lies outside the 2816 bytes of WEIGHTS"),
        (_edit_tensor(Space.WEIGHT, dim_0=Dim.TOKENS), "that its space 2 cannot have"),
        (_edit_tensor(Space.STATE, 0, index=3), "is in state plane 3 of 3"),
        (_edit_tensor(Space.STATE, 0, dim_0=Dim.BLOCKS), "has not the slots as first dimension"),
        (_edit_tensor(Space.STATE, 2, dim_0=Dim.SLOTS), "has not the blocks as first dimension"),
        (_edit_tensor(Space.STATE, 0, size_1=8), "lies outside state plane ring"),
        (_edit_tensor(Space.STATE, 0, offset=4), "lies outside state plane ring"),
        (_edit_tensor(Space.INPUT, Input.POSITIONS, index=10), "is unknown input 10"),
        (_edit_tensor(Space.INPUT, Input.POSITIONS, offset=4), "has not the shape and dtype of POSITIONS"),
        (_edit_tensor(Space.INPUT, Input.SEED, dim_0=Dim.TOKENS), "has not the shape and dtype of SEED"),
        (_edit_tensor(Space.OUTPUT, Output.LOGITS, size_1=VOCAB + 1), "has not the shape and dtype of LOGITS"),
        (_edit_tensor(Space.OUTPUT, Output.SAMPLED, index=2), "is unknown output 2"),
    ],
)
def test_bad_plan(refused: Callable[..., EngineFormatError], damage: Callable[[Parts], None], match: str) -> None:
    parts = hand_parts()
    damage(parts)
    refused(seal(parts), match)


def test_verify_reports_progress_and_passes_exceptions_on(engine: Engine) -> None:
    seen: list[tuple[int, int]] = []
    engine.verify_weights(lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2816, 2816)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.verify_weights(stop)
