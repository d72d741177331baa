"""The arena: buffers that live together lie apart, the rest may share."""

import random

from hypothesis import given
from hypothesis import strategies as st

from dsv4c.plan.memory import ALIGNMENT, Lifetime, plan_arena

BUFFERS = st.lists(
    st.tuples(st.integers(1, 2000), st.integers(0, 12), st.integers(0, 6)).map(lambda t: (t[0], t[1], t[1] + t[2])),
    max_size=30,
).map(lambda rows: [Lifetime(f"b{i}", *row) for i, row in enumerate(rows)])


def padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@given(BUFFERS)
def test_every_arena_is_valid(buffers: list[Lifetime]) -> None:
    arena = plan_arena(buffers)
    assert set(arena.offsets) == {buffer.name for buffer in buffers}
    for i, a in enumerate(buffers):
        start = arena.offsets[a.name]
        assert start % ALIGNMENT == 0 and start + a.size_bytes <= arena.size_bytes
        for b in buffers[i + 1 :]:
            if a.first <= b.last and b.first <= a.last:
                other = arena.offsets[b.name]
                assert start + a.size_bytes <= other or other + b.size_bytes <= start, (a, b)
    # As large as what is alive at once, never larger than everything side by side.
    alive = [sum(padded(b.size_bytes) for b in buffers if b.first <= t <= b.last) for t in range(20)]
    assert max(alive, default=0) <= arena.size_bytes <= arena.unshared_bytes
    assert arena.unshared_bytes == sum(padded(b.size_bytes) for b in buffers)


@given(BUFFERS, st.integers(0, 1000))
def test_the_order_of_the_input_does_not_matter(buffers: list[Lifetime], seed: int) -> None:
    shuffled = list(buffers)
    random.Random(seed).shuffle(shuffled)
    assert plan_arena(shuffled) == plan_arena(buffers)


def test_memory_is_reused() -> None:
    chain = [Lifetime(f"b{i}", 1000, i, i + 1) for i in range(10)]
    arena = plan_arena(chain)
    # Two at a time: the result of a launch and its input.
    assert arena.size_bytes == 2 * 1024 and arena.unshared_bytes == 10 * 1024
    # A gap between two living buffers is used.
    spans = {"a": (640, 0, 9), "b": (320, 0, 3), "c": (256, 2, 9), "d": (192, 5, 9)}
    arena = plan_arena([Lifetime(name, *span) for name, span in spans.items()])
    assert arena.offsets == {"a": 0, "b": 640, "c": 960, "d": 640}


def test_nothing_to_place() -> None:
    assert plan_arena([]).size_bytes == 0
