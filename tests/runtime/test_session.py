"""Sessions on the hand-made engine: steps against the reference operators, state bookkeeping, refused calls."""

import json
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import dsv4c.graph.ops
import dsv4c.graph.state_ops  # noqa: F401  (both register the operators)
from dsv4c.errors import SessionError
from dsv4c.runtime.engine import Engine
from dsv4c.runtime.session import Sampling, Session
from dsv4c.runtime.trace import TraceOutput
from dsv4c.step_abi import DType
from tests.runtime.hand_engine import (
    BLOCK_TOKENS,
    CONTEXT,
    EPS,
    GROUP_ROWS,
    RATIO,
    RING_ROWS,
    ROLLBACK,
    ROTARY,
    SCALE,
    VOCAB,
    WIDTH,
    WINDOW,
    hand_parts,
    weight_arrays,
    write_engine,
)

Logits = npt.NDArray[np.float32]
TOKENS = [int(token) for token in np.random.default_rng(1).integers(0, VOCAB, CONTEXT)]


def reference(tokens: list[int]) -> Logits:
    """Logits of every row of one sequence, with the operators' reference bodies."""
    w = {name: torch.from_numpy(array) for name, array in weight_arrays().items()}
    ops = torch.ops.dsv4
    table = torch.arange(CONTEXT // BLOCK_TOKENS, dtype=torch.int32).unsqueeze(0)
    ids = torch.tensor(tokens, dtype=torch.int32)
    slots, at = torch.zeros_like(ids), torch.arange(len(tokens), dtype=torch.int32)
    ring, groups = torch.zeros(1, RING_ROWS, WIDTH), torch.zeros(1, GROUP_ROWS, 2, WIDTH)
    entries = torch.zeros(CONTEXT // BLOCK_TOKENS, BLOCK_TOKENS // RATIO, WIDTH)
    x = ops.embedding(ids, w["table"], torch.float32)
    compress = (w["ape"], w["norm"], w["inv_freq"], slots, at, table, groups, entries, None)
    ops.compress(x, x, *compress, RATIO, False, EPS, 0, torch.float32)
    attention = (ring, None, entries, None, None, w["sink"], slots, at, table, WINDOW, RATIO, ROTARY, SCALE)
    y = ops.attention(x.unsqueeze(1), x, *attention)
    logits: Logits = ops.linear(y[:, 0], w["head"], None, 0, 0, torch.float32).numpy()
    return logits


EXPECTED = reference(TOKENS)


def feed(session: Session, slot: int, start: int, count: int) -> Logits:
    positions = range(start, start + count)
    return session.step([TOKENS[p] for p in positions], [slot] * count, list(positions))


def close(actual: Logits, expected: Logits) -> bool:
    return bool(np.allclose(actual, expected, rtol=0, atol=1e-5))


@pytest.fixture(params=[False, True], ids=["zeros", "poison"])
def session(engine: Engine, request: pytest.FixtureRequest) -> Session:
    return engine.session(slots=3, poison=request.param)


def check_usable(session: Session) -> None:
    """Slot 0 has 5 positions of TOKENS and continues as it should."""
    assert session.length(0) == 5
    assert close(feed(session, 0, 5, 2), EXPECTED[5:7])


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 8, 9, 20, CONTEXT])
def test_chunks(session: Session, chunk: int) -> None:
    logits = [feed(session, 0, start, min(chunk, CONTEXT - start)) for start in range(0, CONTEXT, chunk)]
    assert close(np.concatenate(logits), EXPECTED)


def test_thread_count_does_not_change_bits(hand_engine_file: Path) -> None:
    results = []
    for threads in (1, 2, 5):
        with Engine.open(hand_engine_file, threads=threads) as engine, engine.session() as session:
            assert engine.info.threads == threads
            results.append(feed(session, 0, 0, 50).tobytes())
    assert len(set(results)) == 1


@pytest.mark.parametrize("count", [2, 6, 20])
def test_logits_rows(session: Session, count: int) -> None:
    positions = list(range(count))
    arguments = TOKENS[:count], [0] * count, positions
    assert session.step(*arguments, logits_rows=[]).shape == (0, VOCAB)
    session.reset(0)
    # In any order, over the pieces of a long step.
    rows = [int(row) for row in np.random.default_rng(2).permutation(count)[: count - 1]]
    assert close(session.step(*arguments, logits_rows=rows), EXPECTED[rows])
    session.reset(0)
    assert close(session.step(*arguments, logits_rows=np.array([count - 1])), EXPECTED[[count - 1]])


def test_interleaved_slots(session: Session) -> None:
    counts = {0: 9, 1: 14, 2: 5}
    order = [
        int(slot) for slot in np.random.default_rng(3).permutation([s for s, n in counts.items() for _ in range(n)])
    ]
    done = dict.fromkeys(counts, 0)
    for start in range(0, len(order), 7):
        slots, positions = order[start : start + 7], []
        for slot in slots:
            positions.append(done[slot])
            done[slot] += 1
        logits = session.step([TOKENS[p] for p in positions], slots, positions)
        assert close(logits, EXPECTED[positions])
    assert {slot: session.length(slot) for slot in counts} == counts


def test_sampling(session: Session) -> None:
    arguments = TOKENS[:20], [0] * 20, list(range(20))
    best = EXPECTED[:20].argmax(1)
    assert session.sample(*arguments, None, Sampling()).tolist() == best.tolist()
    session.reset(0)
    rows = [17, 2, 11]
    sampling = [Sampling(), Sampling(temperature=5.0, top_k=1, seed=2**64 - 1), Sampling(temperature=5.0, top_p=0.0)]
    assert session.sample(*arguments, rows, sampling).tolist() == best[rows].tolist()
    session.reset(0)
    masks = np.zeros((3, VOCAB), np.bool_)
    masks[0, 33] = masks[1, 4] = True
    assert session.sample(*arguments, rows, Sampling(), masks).tolist() == [33, 4, -1]
    session.reset(0)
    words = np.array([[0, 2], [16, 0], [0, 0]], np.uint32)
    assert session.sample(*arguments, rows, Sampling(), words).tolist() == [33, 4, -1]
    session.reset(0)
    assert session.sample(*arguments, [], Sampling()).tolist() == []
    assert session.length(0) == 20
    with pytest.raises(SessionError, match=r"masks are int32 \[3, 3\], expected bool \[3, 40\] or int32 \[3, 2\]"):
        session.sample([1], [1], [0], [0, 0, 0], Sampling(), np.zeros((3, 3), np.int32))
    with pytest.raises(SessionError, match="2 samplings for 1 logits rows"):
        session.sample([1], [1], [0], None, [Sampling()] * 2)


def test_seed_and_position_decide_the_draw(session: Session) -> None:
    arguments = TOKENS[:12], [0] * 12, list(range(12))
    drawn = []
    for seed in (0, 0, 1):
        session.reset(0)
        drawn.append(session.sample(*arguments, None, Sampling(temperature=3.0, seed=seed)).tolist())
    assert drawn[0] == drawn[1] != drawn[2]
    alone = []
    for p in range(12):
        alone += session.sample([TOKENS[p]], [1], [p], None, Sampling(temperature=3.0)).tolist()
    assert alone == drawn[0]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"temperature": -1.0}, "temperature -1 of logits row 0 is not a number from 0"),
        ({"temperature": float("nan")}, "temperature nan of logits row 0"),
        ({"temperature": float("inf")}, "temperature inf of logits row 0"),
        ({"top_k": -1}, "top_k -1 of logits row 0 is negative"),
        ({"top_k": 2**40}, "top_k must be integers of 32 bits"),
        ({"top_p": 1.5}, "top_p 1.5 of logits row 0 is not between 0 and 1"),
        ({"top_p": float("nan")}, "top_p nan of logits row 0"),
    ],
)
def test_refused_sampling(session: Session, changes: dict[str, Any], match: str) -> None:
    feed(session, 0, 0, 5)
    with pytest.raises(SessionError, match=match):
        session.sample([1], [0], [5], None, Sampling(**changes))
    check_usable(session)


@pytest.mark.parametrize(
    ("step", "match"),
    [
        (([], [], []), "a step needs at least one row"),
        (([VOCAB], [0], [5]), "row 0: token 40 is outside the vocabulary of 40"),
        (([-1], [0], [5]), "row 0: token -1 is outside the vocabulary of 40"),
        (([1], [3], [0]), "row 0: slot 3 does not exist; the session has 3"),
        (([1], [-1], [0]), "row 0: slot -1 does not exist"),
        (([1], [0], [6]), "row 0: slot 0 continues at position 5, not 6"),
        (([1], [0], [4]), "row 0: slot 0 continues at position 5, not 4"),
        (([1], [0], [-5]), "row 0: slot 0 continues at position 5, not -5"),
        (([1, 1], [0, 0], [5, 7]), "row 1: slot 0 continues at position 6, not 7"),
        (([1, 1], [0, 0], [5, 5]), "row 1: slot 0 continues at position 6, not 5"),
        (([1, 1], [1, 0], [0, 0]), "row 1: slot 0 continues at position 5, not 0"),
        (([1] * 60, [0] * 60, [*range(5, 65)]), "row 59: position 64 of slot 0 is beyond the session's context of 64"),
        (([1], [0], [5], [1]), "logits row 1 is not one of the step's 1 rows"),
        (([1], [0], [5], [-1]), "logits row -1 is not one of"),
        (([1, 2], [0, 1], [5, 0], [1, 1]), "logits row 1 is asked for twice"),
        (([1], [0, 0], [5]), "a step has 1 token ids, 2 slots and 1 positions"),
        (([2**31], [0], [5]), "token_ids must be integers of 32 bits"),
        (([1.5], [0], [5]), "token_ids must be integers of 32 bits, found float64"),
        (([[1]], [0], [5]), "token_ids has 2 dimensions"),
    ],
)
def test_refused_steps_change_nothing(session: Session, step: tuple[Any, ...], match: str) -> None:
    feed(session, 0, 0, 5)
    with pytest.raises(SessionError, match=match):
        session.step(*step)
    with pytest.raises(SessionError, match=match):
        session.sample(*step[:3], step[3] if len(step) > 3 else None, Sampling())
    assert session.length(1) == 0
    check_usable(session)


def test_unknown_slots_and_positions(session: Session) -> None:
    feed(session, 0, 0, 5)
    data = session.save(0)
    calls: list[Callable[[], object]] = [
        lambda: session.length(3),
        lambda: session.reset(3),
        lambda: session.truncate(3, 0),
        lambda: session.fork(0, 3),
        lambda: session.fork(3, 0),
        lambda: session.save(3),
        lambda: session.restore(3, data),
        lambda: session.reset(-1),
    ]
    for call in calls:
        with pytest.raises(SessionError, match=r"slot -?[13] does not exist"):
            call()
    with pytest.raises(SessionError, match="cannot be truncated to position -1"):
        session.truncate(0, -1)
    check_usable(session)


def test_truncate(session: Session) -> None:
    feed(session, 0, 0, 20)
    with pytest.raises(SessionError, match="slot 0 has 20 positions; it cannot be truncated to 21"):
        session.truncate(0, 21)
    for position in (20, 18, 17):
        session.truncate(0, position)
        assert session.length(0) == position
    with pytest.raises(
        SessionError, match="slot 0 has reached position 20; it can be truncated to 0 or to 17 and above, not to 16"
    ):
        session.truncate(0, 16)
    assert close(feed(session, 0, 17, 2), EXPECTED[17:19])
    # The ring still lacks what position 19 overwrote.
    with pytest.raises(SessionError, match="to 17 and above"):
        session.truncate(0, 16)
    assert close(feed(session, 0, 19, 10), EXPECTED[19:29])
    session.truncate(0, 29 - ROLLBACK)
    assert close(feed(session, 0, 29 - ROLLBACK, 10), EXPECTED[29 - ROLLBACK : 39 - ROLLBACK])
    session.truncate(0, 0)
    assert session.length(0) == 0
    assert close(feed(session, 0, 0, 9), EXPECTED[:9])


@pytest.mark.parametrize("overshoot", range(1, ROLLBACK + 1))
@pytest.mark.parametrize("length", [1, 4, 7, 10, 21])
def test_truncate_after_overshoot(session: Session, length: int, overshoot: int) -> None:
    feed(session, 1, 0, length)
    wrong = [(TOKENS[p] + 1) % VOCAB for p in range(length, length + overshoot)]
    session.step(wrong, [1] * overshoot, list(range(length, length + overshoot)))
    session.truncate(1, length)
    assert close(feed(session, 1, length, 9), EXPECTED[length : length + 9])


def test_fork(session: Session) -> None:
    feed(session, 0, 0, 19)
    feed(session, 2, 0, 30)
    session.fork(0, 2)
    session.fork(2, 2)
    assert [session.length(slot) for slot in range(3)] == [19, 0, 19]
    session.truncate(2, 17)
    assert close(feed(session, 2, 17, 20), EXPECTED[17:37])
    assert close(feed(session, 0, 19, 5), EXPECTED[19:24])
    session.fork(1, 0)
    assert session.length(0) == 0
    assert close(feed(session, 0, 0, 5), EXPECTED[:5])


@pytest.mark.parametrize("length", [0, 1, 5, 16, 33])
def test_save_and_restore(engine: Engine, session: Session, length: int) -> None:
    if length:
        feed(session, 0, 0, length + 2)
        session.truncate(0, length)
    data = session.save(0)
    assert len(data) == 64 + 4 * WIDTH * (RING_ROWS + 2 * GROUP_ROWS + length // RATIO)
    feed(session, 1, 0, 40)
    with engine.session(slots=2, context=length + 10, poison=True) as other:
        for target, slot in ((session, 1), (other, 1)):
            target.restore(slot, data)
            assert target.length(slot) == length
            if length > 5:
                with pytest.raises(SessionError, match=f"to {length - 1} and above"):
                    target.truncate(slot, length - 2)
                target.truncate(slot, length - 1)
                target.restore(slot, data)
            assert target.save(slot) == data
            assert close(feed(target, slot, length, 10), EXPECTED[length : length + 10])


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda data: b"", "not a saved slot: the 0 bytes"),
        (lambda data: data[:63], "not a saved slot: the 63 bytes"),
        (lambda data: b"x" + data[1:], "not a saved slot"),
        (lambda data: data[:8] + b"\x02" + data[9:], "saved slot has version 2; this runtime reads 1"),
        (lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:], "saved slot belongs to another engine"),
        (lambda data: data[:48] + struct.pack("<I", CONTEXT + 1) + data[52:], "saved slot has 65 positions"),
        (lambda data: data[:52] + struct.pack("<I", 3) + data[56:], "saved slot is damaged: length 5, highest"),
        (lambda data: data[:52] + struct.pack("<I", 20) + data[56:], "saved slot is damaged: length 5, highest"),
        (lambda data: data[:56] + bytes(8) + data[64:], "bytes, expected"),
        (lambda data: data[:-1], "bytes, expected"),
        (lambda data: data + b"x", "bytes, expected"),
    ],
)
def test_refused_restore_changes_nothing(session: Session, damage: Callable[[bytes], bytes], match: str) -> None:
    feed(session, 0, 0, 5)
    with pytest.raises(SessionError, match=match):
        session.restore(0, damage(session.save(0)))
    check_usable(session)


def test_state_of_other_weights_is_refused(session: Session, tmp_path: Path) -> None:
    parts = hand_parts()
    parts.weights[0] ^= 1
    feed(session, 0, 0, 5)
    with Engine.open(write_engine(tmp_path / "other.dsv4c", parts)) as other:
        other_session = other.session()
    with pytest.raises(SessionError, match="saved slot belongs to another engine"):
        other_session.restore(0, session.save(0))


def test_restore_into_a_smaller_context(engine: Engine, session: Session) -> None:
    feed(session, 0, 0, 20)
    with (
        engine.session(context=19) as small,
        pytest.raises(SessionError, match="20 positions, the session's context is"),
    ):
        small.restore(0, session.save(0))


def test_context(engine: Engine) -> None:
    assert engine.session().context == CONTEXT
    with engine.session(context=6) as session:
        assert close(feed(session, 0, 0, 6), EXPECTED[:6])
        with pytest.raises(SessionError, match="position 6 of slot 0 is beyond the session's context of 6"):
            feed(session, 0, 6, 1)
    for context in (0, CONTEXT + 1):
        with pytest.raises(SessionError, match=f"context of {context} positions; the engine allows 1 to 64"):
            engine.session(context=context)
    with pytest.raises(SessionError, match="0 slots"):
        engine.session(slots=0)
    with pytest.raises(SessionError, match="needs 34359738352 state blocks") as caught:
        engine.session(slots=2**31 - 1)
    assert caught.value.hint == "use fewer slots or a smaller context"


def test_out_of_memory_says_for_what(tmp_path: Path) -> None:
    parts = hand_parts()
    # The plane is not used by any launch, so its size contradicts no tensor.
    parts.states.append(parts.states[0].__class__(parts.string("huge"), 1, DType.U8, 0, 1, 1, 2**60))
    with Engine.open(write_engine(tmp_path / "huge.dsv4c", parts)) as engine:
        with pytest.raises(SessionError, match=r"no memory for the state of 1 slots with 64 positions: 115\d+ bytes"):
            engine.session()
        with pytest.raises(SessionError, match=r"state plane huge of 64 slots .* exceeds the address space"):
            engine.session(slots=64)


def test_trace(session: Session) -> None:
    events: list[tuple[int, str, str, int | None, list[TraceOutput]]] = []
    session.trace(TOKENS[:3], [0] * 3, [0, 1, 2], lambda *event: events.append(event))
    assert [event[:4] for event in events] == [
        (0, "embedding", "embedding_node", None),
        (1, "compress", "compress_node", 0),
        (2, "attention", "attention_node", 0),
        (3, "commit_ring", "commit_ring_node", 0),
        (4, "gather_rows", "gather_rows_node", None),
        (5, "linear", "linear_node", None),
    ]
    embedded, logits = events[0][4][0], events[5][4][0]
    assert embedded.dtype == DType.F32 and embedded.data.shape == (3, WIDTH)
    assert (embedded.to_float32() == weight_arrays()["table"][TOKENS[:3]]).all()
    assert events[1][4] == []
    assert close(logits.to_float32(), EXPECTED[:3])
    assert session.length(0) == 3
    # A step in three pieces.
    times = session.profile(TOKENS[3:20], [0] * 17, list(range(3, 20)), logits_rows=[16])
    assert [time.rows for time in times] == [8] * 4 + [8] * 4 + [1] * 6
    assert all(time.seconds >= 0 and time.flops == 200 and time.bytes_moved == 100 for time in times)
    assert session.length(0) == 20


def test_stopped_trace(session: Session) -> None:
    feed(session, 0, 0, 10)

    def stop(launch: int, kernel: str, *rest: object) -> None:
        if kernel == "linear":
            raise KeyError(kernel)

    # Two rows fit into the rollback rows: the slot is as it was, but may not go back further.
    with pytest.raises(KeyError, match="linear"):
        session.trace([1, 2], [0, 0], [10, 11], stop)
    assert session.length(0) == 10
    with pytest.raises(SessionError, match="slot 0 has reached position 12; it can be truncated to 0 or to 9"):
        session.truncate(0, 8)
    assert close(feed(session, 0, 10, 4), EXPECTED[10:14])
    # Four do not.
    with pytest.raises(KeyError, match="linear"):
        session.trace([1] * 4, [0] * 4, list(range(14, 18)), stop)
    assert session.length(0) == 0
    assert close(feed(session, 0, 0, 4), EXPECTED[:4])


def test_a_session_used_by_two_threads_is_busy(session: Session) -> None:
    feed(session, 0, 0, 5)
    inside, leave = threading.Event(), threading.Event()

    def wait(launch: int, *rest: object) -> None:
        if launch == 0:
            inside.set()
            assert leave.wait(30)

    thread = threading.Thread(target=session.trace, args=([1], [1], [0], wait))
    thread.start()
    assert inside.wait(30)
    calls: list[Callable[[], object]] = [
        lambda: feed(session, 0, 5, 1),
        lambda: session.sample([1], [0], [5], None, Sampling()),
        lambda: session.length(0),
        lambda: session.reset(0),
        lambda: session.save(0),
    ]
    for call in calls:
        with pytest.raises(SessionError, match="the session is in use") as caught:
            call()
        assert caught.value.hint == "use one session per thread"
    leave.set()
    thread.join()
    assert session.length(1) == 1
    check_usable(session)


def test_a_callback_cannot_step_its_own_session(session: Session) -> None:
    with pytest.raises(SessionError, match="in use"):
        session.trace([1], [0], [0], lambda *event: session.reset(0))


def test_sessions_of_one_engine_run_in_parallel(engine: Engine) -> None:
    failures: list[int] = []

    def run(number: int) -> None:
        with engine.session(slots=2) as session:
            for _ in range(20):
                session.reset(1)
                if not close(feed(session, 1, 0, 30), EXPECTED[:30]):
                    failures.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_close_in_any_order(hand_engine_file: Path) -> None:
    engine = Engine.open(hand_engine_file)
    session = engine.session()
    engine.close()
    engine.close()
    assert close(feed(session, 0, 0, 4), EXPECTED[:4])
    for call in (engine.session, engine.manifest, engine.verify_weights):
        with pytest.raises(SessionError, match="the engine is closed"):
            call()
    session.close()
    session.close()
    with pytest.raises(SessionError, match="the session is closed"):
        session.length(0)


def test_generate(engine: Engine) -> None:
    tokens, expected = TOKENS[:5], []
    for _ in range(12):
        expected.append(int(reference(tokens)[-1].argmax()))
        tokens = [*tokens, expected[-1]]
    assert list(engine.generate(TOKENS[:5], 12, stop_ids=[])) == expected
    stop = expected[4]
    assert list(engine.generate(TOKENS[:5], 12, stop_ids=[stop])) == expected[: expected.index(stop)]
    assert list(engine.generate(TOKENS[:5], 0)) == []
    with pytest.raises(SessionError, match="the prompt is empty"):
        engine.generate([])
    with pytest.raises(SessionError, match="context of 68 positions; the engine allows 1 to 64"):
        engine.generate(TOKENS[:8], 60)


def test_needs_numpy_only(hand_engine_file: Path) -> None:
    script = f"""
import json, sys
from dsv4c.runtime import Engine
with Engine.open({str(hand_engine_file)!r}) as engine:
    list(engine.generate([1, 2, 3], 4))
wanted = ["torch", "click", "rich", "tokenizers", "safetensors", "dsv4c.compiler", "dsv4c.graph", "dsv4c.checkpoint"]
print(json.dumps([name for name in wanted if name in sys.modules]))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == []
