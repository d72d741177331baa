"""What a session says of its routing: on the hand-made engine, whose routers choose what is known."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsv4c.errors import EngineFormatError, SessionError
from dsv4c.graph import expert_ops  # noqa: F401  (registers the operators)
from dsv4c.runtime import library as lib
from dsv4c.runtime.engine import Engine
from dsv4c.runtime.session import Session
from dsv4c.step_abi import Dim, DType, Space, StateKind
from tests.runtime.hand_engine import (
    CHOICES,
    CONTEXT,
    COUNTED_LAYERS,
    VOCAB,
    WIDTH,
    Parts,
    expert_bias,
    expert_table,
    hand_parts,
    weight_arrays,
    write_engine,
)

TOKENS = [int(token) for token in np.random.default_rng(1).integers(0, VOCAB, CONTEXT)]
Counts = list[list[int]]
NONE: Counts = [[0] * WIDTH] * len(COUNTED_LAYERS)


def reference(tokens: list[int]) -> Counts:
    """What the rows of these tokens choose, with the operators' reference bodies."""
    ids = torch.tensor(tokens, dtype=torch.int32)
    x = torch.from_numpy(weight_arrays()["table"])[ids.long()]
    by_token, _ = torch.ops.dsv4.route_hash(x, torch.from_numpy(expert_table()), ids, 1.0)
    by_score, _ = torch.ops.dsv4.route_topk(x, torch.from_numpy(expert_bias()), CHOICES, 1.0)
    return [np.bincount(chosen.flatten().numpy(), minlength=WIDTH).tolist() for chosen in (by_token, by_score)]


@pytest.fixture(scope="module")
def counting_engine_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine(tmp_path_factory.mktemp("engine") / "counting.dsv4c", hand_parts(counting=True))


@pytest.fixture
def counting(counting_engine_file: Path) -> Iterator[Engine]:
    with Engine.open(counting_engine_file, threads=2) as opened:
        yield opened


@pytest.fixture(params=[False, True], ids=["zeros", "poison"])
def session(counting: Engine, request: pytest.FixtureRequest) -> Session:
    return counting.session(slots=3, poison=request.param)


def counted(session: Session) -> Counts:
    found = session.routing_counts()
    assert found.layers == COUNTED_LAYERS and found.counts.dtype == np.uint64
    numbers: Counts = found.counts.tolist()
    return numbers


def feed(session: Session, slot: int, start: int, count: int) -> None:
    positions = range(start, start + count)
    session.step([TOKENS[p] for p in positions], [slot] * count, list(positions), [])


def test_info(counting: Engine, engine: Engine) -> None:
    assert (counting.info.counted_layers, counting.info.counted_experts) == (len(COUNTED_LAYERS), WIDTH)
    assert (engine.info.counted_layers, engine.info.counted_experts) == (0, 0)


@pytest.mark.parametrize("chunk", [1, 2, 3, 8, 9, 20, CONTEXT])
def test_every_row_counts_once(session: Session, chunk: int) -> None:
    """In steps that fill their bucket or do not, and in pieces of a step that no bucket holds."""
    assert counted(session) == NONE
    for start in range(0, CONTEXT, chunk):
        feed(session, 0, start, min(chunk, CONTEXT - start))
        done = min(start + chunk, CONTEXT)
        assert counted(session) == reference(TOKENS[:done])
    assert [sum(row) for row in counted(session)] == [CONTEXT * CHOICES] * len(COUNTED_LAYERS)


def test_slots_count_together(session: Session) -> None:
    session.step([5, 6, 7, 8, 9], [2, 0, 2, 1, 0], [0, 0, 1, 0, 1])
    session.step([10, 11, 12], [0, 1, 2], [2, 1, 2], [])
    assert counted(session) == reference([5, 6, 7, 8, 9, 10, 11, 12])


def test_what_happens_to_a_slot_does_not_change_the_counts(session: Session) -> None:
    feed(session, 0, 0, 20)
    expected = reference(TOKENS[:20])
    session.fork(0, 1)
    session.truncate(0, 18)
    saved = session.save(0)
    session.reset(0)
    session.restore(2, saved)
    assert counted(session) == expected
    # Rows that are run again count again.
    feed(session, 2, 18, 2)
    assert counted(session) == reference([*TOKENS[:20], *TOKENS[18:20]])


def test_saved_slots_hold_no_counts(session: Session, engine: Engine) -> None:
    feed(session, 0, 0, 9)
    with engine.session(slots=1) as other:
        other.step(TOKENS[:9], [0] * 9, list(range(9)), [])
        assert session.save(0)[64:] == other.save(0)[64:]


def test_reset(session: Session) -> None:
    feed(session, 0, 0, 7)
    session.reset_routing_counts()
    assert counted(session) == NONE and session.length(0) == 7
    feed(session, 0, 7, 4)
    assert counted(session) == reference(TOKENS[7:11])


def test_sessions_count_apart(counting: Engine) -> None:
    one, other = counting.session(), counting.session()
    feed(one, 0, 0, 5)
    feed(other, 0, 0, 3)
    other.reset_routing_counts()
    assert counted(one) == reference(TOKENS[:5]) and counted(other) == NONE


def test_traced_and_sampled_rows_count_and_refused_ones_do_not(session: Session) -> None:
    session.trace(TOKENS[:3], [0] * 3, [0, 1, 2], lambda *event: None)
    session.profile([TOKENS[3]], [0], [3])
    assert counted(session) == reference(TOKENS[:4])
    with pytest.raises(SessionError, match="continues at position 4"):
        session.step([1], [0], [9])
    assert counted(session) == reference(TOKENS[:4])


def test_an_array_of_its_own(session: Session) -> None:
    feed(session, 0, 0, 2)
    before = session.routing_counts()
    feed(session, 0, 2, 2)
    assert before.counts.tolist() == reference(TOKENS[:2])


def test_engine_without_counts(engine: Engine) -> None:
    with engine.session() as session:
        for call in (session.routing_counts, session.reset_routing_counts):
            with pytest.raises(SessionError, match="the engine does not count its routing") as raised:
                call()
            assert raised.value.hint is not None and "`counts = true`" in raised.value.hint


def test_closed_session(counting: Engine) -> None:
    session = counting.session()
    session.close()
    for call in (session.routing_counts, session.reset_routing_counts):
        with pytest.raises(SessionError, match="the session is closed"):
            call()


def test_busy(counting: Engine) -> None:
    """A callback of the session's own step finds it in use."""
    session = counting.session()
    with pytest.raises(SessionError, match="in use"):
        session.trace([1], [0], [0], lambda *event: session.routing_counts())


def test_c_interface(counting_engine_file: Path, hand_engine_file: Path) -> None:
    library, invalid = lib.load_library(), lib.Status.INVALID_ARGUMENT
    layers, counts = (ctypes.c_uint32 * 2)(9, 9), (ctypes.c_uint64 * 16)(*[7] * 16)

    def opened(path: Path) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        engine, session = ctypes.c_void_p(), ctypes.c_void_p()
        assert library.dsv4c_engine_open(bytes(path), None, ctypes.byref(engine)) == lib.Status.OK
        assert library.dsv4c_session_create(engine, None, ctypes.byref(session)) == lib.Status.OK
        return engine, session

    engine, session = opened(counting_engine_file)
    read, reset = library.dsv4c_session_routing_counts, library.dsv4c_session_reset_routing_counts
    for arguments, message in (
        ((None, layers, counts, 16), "session must not be null"),
        ((session, layers, None, 16), "counts must not be null"),
        ((session, layers, counts, 15), "the counts of 2 layers with 8 experts are 16 numbers, there is room for 15"),
    ):
        assert read(*arguments) == invalid and message in library.dsv4c_last_error().decode()
    assert reset(None) == invalid
    assert list(layers) == [9, 9] and list(counts) == [7] * 16
    assert read(session, None, counts, 17) == lib.Status.OK and list(counts) == [0] * 16
    assert read(session, layers, counts, 16) == lib.Status.OK and list(layers) == list(COUNTED_LAYERS)
    # An older caller's struct ends before the counts.
    info = lib.Info(struct_size=lib.Info.counted_layers.offset, counted_layers=5)
    assert library.dsv4c_engine_get_info(engine, ctypes.byref(info)) == lib.Status.OK and info.counted_layers == 5
    plain_engine, plain = opened(hand_engine_file)
    for status in (read(plain, layers, counts, 16), reset(plain)):
        assert status == invalid
        assert "does not count its routing; build it with `counts = true`" in library.dsv4c_last_error().decode()
    for pair in ((engine, session), (plain_engine, plain)):
        library.dsv4c_engine_close(pair[0])
        library.dsv4c_session_destroy(pair[1])


def _state(**changes: Any) -> Callable[[Parts], None]:
    """Of the second layer that counts."""
    return lambda parts: parts.edit("states", 4, **changes)


def _tensor(**changes: Any) -> Callable[[Parts], None]:
    return lambda parts: parts.edit("tensors", parts.tensor_index(Space.STATE, 3), **changes)


def _counts_elsewhere(parts: Parts) -> None:
    """The counts are those of a weight that has their shape: the hash table, cut."""
    table = next(i for i, t in enumerate(parts.tensors) if t.space == Space.WEIGHT and t.dtype == DType.I64)
    parts.edit("tensors", parts.tensor_index(Space.STATE, 3), space=Space.WEIGHT, offset=parts.tensors[table].offset)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (_state(kind=4), "state plane counts_2 has unknown kind 4"),
        (_state(dtype=DType.F32), "state plane counts_2 holds counts of 8 bytes, dtype 1; they are int64"),
        (_state(row_bytes=16), "state plane counts_2 holds counts of 16 bytes"),
        (_state(layer=3), "state plane counts_2 counts the routing of layer 3 of 3"),
        (_state(layer=0), "state plane counts_2 counts 8 experts of layer 0 behind 8 experts of layer 0"),
        (_state(rows=9), "state plane counts_2 counts 9 experts of layer 2 behind 8 experts of layer 0"),
        (_state(rows=2**31), "counts 2147483648 experts of layer 2 behind"),
        (_state(kind=StateKind.SLOT), "has not the slots as first dimension"),
        (_tensor(size_1=WIDTH + 1), "has not the shape and dtype of the counts in state plane counts_0"),
        (_tensor(size_0=2), "has not the shape and dtype of the counts"),
        (_tensor(stride_1=2), "has not the shape and dtype of the counts"),
        (_tensor(offset=8), "has not the shape and dtype of the counts"),
        (_tensor(dtype=DType.F32), "has not the shape and dtype of the counts"),
        (_tensor(dim_0=Dim.SLOTS), "has not the shape and dtype of the counts"),
        (_tensor(index=0), "in state plane ring has not the slots as first dimension"),
        (_counts_elsewhere, "argument 1 of launch 2 .* does not fit kernel count_routing"),
    ],
)
def test_damaged_plans(tmp_path: Path, damage: Callable[[Parts], None], match: str) -> None:
    parts = hand_parts(counting=True)
    damage(parts)
    with pytest.raises(EngineFormatError, match=match):
        Engine.open(write_engine(tmp_path / "bad.dsv4c", parts))
