"""The engine against transformers in fp32: the base oracle. Exact numerics, random weights that are trivial nowhere.

The bound is 1e-4 on every logit (their spread is about 1) and equal argmax on every row.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from dsv4c.runtime.engine import Engine
from dsv4c.runtime.session import Session
from tests.model_cases import SEQUENCES, TOKENS, Logits, ModelCase, parity_case

MAX_DIFFERENCE = 1e-4
CONTEXT = 512
# Chunks around the ratios (4, 8, 24, 128) and the windows (20, 48, 64), shorter and longer than they are.
CHUNKS = (3, 4, 5, 63, 64, 65, 127, 128, 129, 200)
CASES = [
    ("tiny", "none"),
    ("tiny", "fp8_fp4"),
    ("partial_blocks", "fp8_fp4"),
    ("partial_blocks", "fp8"),
    ("narrow", "none"),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> ModelCase:
    return parity_case(*request.param)


@pytest.fixture
def session(case: ModelCase) -> Iterator[Session]:
    with Engine.open(case.engine) as engine:
        yield engine.session(slots=SEQUENCES, context=CONTEXT)


def feed(session: Session, case: ModelCase, sequence: int, start: int, end: int, slot: int | None = None) -> Logits:
    rows = end - start
    slot = sequence if slot is None else slot
    return session.step(case.ids[sequence, start:end], [slot] * rows, np.arange(start, end))


def assert_parity(found: Logits, expected: Logits) -> None:
    assert found.shape == expected.shape
    difference = np.abs(found - expected).max()
    assert difference <= MAX_DIFFERENCE
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))


def test_whole_prefill(case: ModelCase, session: Session) -> None:
    assert_parity(feed(session, case, 0, 0, TOKENS), case.logits[0])


def test_single_steps(case: ModelCase, session: Session) -> None:
    rows = [feed(session, case, 1, t, t + 1) for t in range(TOKENS)]
    assert_parity(np.concatenate(rows), case.logits[1])


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_of_equal_size(case: ModelCase, session: Session, chunk: int) -> None:
    cuts = [*range(0, TOKENS, chunk), TOKENS]
    rows = [feed(session, case, 0, a, b) for a, b in pairwise(cuts)]
    assert_parity(np.concatenate(rows), case.logits[0])


@pytest.mark.parametrize("seed", range(3))
def test_chunks_of_random_sizes(case: ModelCase, session: Session, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cuts = [0, *sorted(rng.choice(np.arange(1, TOKENS), 9, replace=False)), TOKENS]
    rows = [feed(session, case, 2, a, b) for a, b in pairwise(cuts)]
    assert_parity(np.concatenate(rows), case.logits[2])


def test_three_slots_interleaved_in_one_step(case: ModelCase, session: Session) -> None:
    # Uneven lengths, so that the slots close their groups and wrap their windows at different rows.
    step = {0: 3, 1: 1, 2: 2}
    done = [0] * SEQUENCES
    found: list[list[Logits]] = [[] for _ in range(SEQUENCES)]
    while done[0] < 297:
        order = [(s, done[s] + k) for k in range(3) for s in range(SEQUENCES) if k < step[s]]
        tokens = [case.ids[s, t] for s, t in order]
        logits = session.step(tokens, [s for s, _ in order], [t for _, t in order])
        for row, (s, _) in enumerate(order):
            found[s].append(logits[row])
        done = [done[s] + step[s] for s in range(SEQUENCES)]
    for s in range(SEQUENCES):
        assert_parity(np.stack(found[s]), case.logits[s, : done[s]])


def test_only_the_asked_rows(case: ModelCase, session: Session) -> None:
    rows = [49, 0, 7]
    logits = session.step(case.ids[0, :50], [0] * 50, np.arange(50), rows)
    assert_parity(logits, case.logits[0, rows])
    none = session.step(case.ids[0, 50:60], [0] * 10, np.arange(50, 60), [])
    assert none.shape == (0, case.logits.shape[2])
    assert_parity(feed(session, case, 0, 60, 61), case.logits[0, 60:61])


@pytest.mark.parametrize("position", [37, 64, 150, 257])
@pytest.mark.parametrize("overshoot", [1, 5, 16])
def test_truncate_after_overshoot(case: ModelCase, session: Session, position: int, overshoot: int) -> None:
    feed(session, case, 0, 0, position)
    # Other tokens than the sequence goes on with, as a rejected draft would be.
    wrong = case.ids[1, :overshoot]
    session.step(wrong, [0] * overshoot, np.arange(position, position + overshoot))
    session.truncate(0, position)
    assert session.length(0) == position
    assert_parity(feed(session, case, 0, position, TOKENS), case.logits[0, position:])


def test_fork(case: ModelCase, session: Session) -> None:
    feed(session, case, 0, 0, 141)
    session.fork(0, 2)
    # The source goes another way; the copy must not see it.
    session.step(case.ids[1, :40], [0] * 40, np.arange(141, 181))
    assert_parity(feed(session, case, 0, 141, TOKENS, slot=2), case.logits[0, 141:])


def test_save_and_restore_into_another_session(case: ModelCase, session: Session) -> None:
    feed(session, case, 1, 0, 155)
    saved = session.save(1)
    with Engine.open(case.engine) as engine:
        other = engine.session(slots=2, context=CONTEXT)
        other.restore(0, saved)
        assert other.length(0) == 155
        assert_parity(feed(other, case, 1, 155, TOKENS, slot=0), case.logits[1, 155:])


def test_reset_forgets(case: ModelCase, session: Session) -> None:
    feed(session, case, 1, 0, 200, slot=0)
    session.reset(0)
    assert_parity(feed(session, case, 0, 0, TOKENS), case.logits[0])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_do_not_depend_on_the_thread_count(case: ModelCase, threads: int) -> None:
    def run(threads: int) -> Logits:
        with Engine.open(case.engine, threads=threads) as engine:
            return feed(engine.session(context=CONTEXT), case, 0, 0, 40, slot=0)

    np.testing.assert_array_equal(run(threads), run(1))
