"""A step may hold any part of any sequences: the oracle gives the same logits however they are cut."""

import pytest
import torch
from torch import Tensor

from dsv4c.graph.interpreter import Oracle
from tests.graph.small_models import checkpoint, final_graph, graph

LENGTH = 34  # longer than the ring of `narrow` (20 + 8), with four HCA groups and eight CSA ones


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def oracle(*, slots: int = 1) -> Oracle:
    return Oracle(final_graph("narrow", "exact"), checkpoint("narrow"), slots, 256, poison=True)


def run(session: Oracle, tokens: list[int], start: int, stop: int, slot: int = 0) -> Tensor:
    return session.step(tokens[start:stop], [slot] * (stop - start), list(range(start, stop)))


@pytest.fixture(scope="module")
def whole() -> Tensor:
    return run(oracle(), ids(LENGTH), 0, LENGTH)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    # float32 sums in another order.
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_the_plain_graph_is_the_same_model(whole: Tensor) -> None:
    session = Oracle(graph("narrow"), checkpoint("narrow"), 1, 256, poison=True)
    assert_same(run(session, ids(LENGTH), 0, LENGTH), whole)


@pytest.mark.parametrize("cut", range(1, LENGTH))
def test_two_chunks(cut: int, whole: Tensor) -> None:
    session = oracle()
    assert_same(run(session, ids(LENGTH), 0, cut), whole[:cut])
    assert_same(run(session, ids(LENGTH), cut, LENGTH), whole[cut:])


@pytest.mark.parametrize("size", [1, 2, 5, 13])
def test_equal_chunks(size: int, whole: Tensor) -> None:
    session = oracle()
    parts = [run(session, ids(LENGTH), s, min(s + size, LENGTH)) for s in range(0, LENGTH, size)]
    assert_same(torch.cat(parts), whole)


def test_sequences_side_by_side(whole: Tensor) -> None:
    session = oracle(slots=3)
    other = ids(LENGTH, seed=1)
    first = session.step(ids(4) + other[:2] + ids(6)[4:], [2] * 4 + [0] * 2 + [2] * 2, [0, 1, 2, 3, 0, 1, 4, 5])
    assert_same(first[[0, 1, 2, 3, 6, 7]], whole[:6])
    alone = run(oracle(), other, 0, 2)
    assert_same(first[4:6], alone)
    assert_same(run(session, ids(LENGTH), 6, LENGTH, slot=2), whole[6:])


def test_positions_are_rewritten(whole: Tensor) -> None:
    session = oracle()
    run(session, ids(21) + ids(4, seed=7), 0, 25)
    assert_same(run(session, ids(LENGTH), 21, LENGTH), whole[21:])


def test_logits_of_asked_rows_only(whole: Tensor) -> None:
    tokens = ids(LENGTH)
    picked = oracle().step(tokens, [0] * LENGTH, list(range(LENGTH)), [33, 0, 7])
    assert_same(picked, whole[[33, 0, 7]])
    assert oracle().step(tokens[:5], [0] * 5, list(range(5)), []).shape == (0, 97)


def test_trace_has_every_node() -> None:
    trace: dict[str, Tensor] = {}
    session = oracle()
    logits = session.step(ids(3), [0] * 3, [0, 1, 2], trace=trace)
    calls = [node.name for node in session.gm.graph.nodes if node.op == "call_function"]
    assert list(trace) == calls
    assert torch.equal(trace["logits"], logits)
