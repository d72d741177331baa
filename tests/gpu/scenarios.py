"""What is run on a CPU engine and on a GPU engine of the same model and numerics, to be compared.

A scenario drives one engine through its sessions and returns what it saw, by name. Numpy and the runtime only: it runs
on a machine without the compiler.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dsv4c.runtime.engine import Engine
from dsv4c.runtime.session import Sampling, Session

Array = npt.NDArray[Any]
Seen = dict[str, Array]
Scenario = Callable[[Engine], Seen]

TOKENS = 300
CONTEXT = 512


def kept(seen: Array, engine: Engine) -> Array:
    """What of an array is stored and compared: of logits over a large vocabulary some 512 columns."""
    return seen[..., :: max(1, engine.info.vocab_size // 512)] if seen.dtype == np.float32 else seen


def token_ids(engine: Engine, count: int = TOKENS, seed: int = 5) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, engine.info.vocab_size, count).astype(np.int32)


def run_rows(session: Session, ids: npt.NDArray[np.int32], slot: int, first: int) -> npt.NDArray[np.float32]:
    """One step of consecutive positions of a slot."""
    count = len(ids)
    return session.step(ids, [slot] * count, list(range(first, first + count)))


def prefill(engine: Engine) -> Seen:
    """A chunk longer than the window, in poisoned memory."""
    with engine.session(1, CONTEXT, poison=True) as session:
        return {"logits": run_rows(session, token_ids(engine), 0, 0)}


def single_steps(engine: Engine) -> Seen:
    """Token by token, through the smallest decode bucket."""
    ids = token_ids(engine)[:150]
    with engine.session(1, CONTEXT, poison=True) as session:
        return {"logits": np.concatenate([run_rows(session, ids[i : i + 1], 0, i) for i in range(len(ids))])}


def chunks(engine: Engine) -> Seen:
    """Chunks around the tile and window sizes."""
    ids = token_ids(engine)
    seen: Seen = {}
    for name, cuts in {"a": (1, 127, 128), "b": (129, 130, 257), "c": (3, 7, 50, 63, 64, 65, 200)}.items():
        edges = [0, *cuts, len(ids)]
        with engine.session(1, CONTEXT, poison=True) as session:
            parts = [run_rows(session, ids[a:b], 0, a) for a, b in pairwise(edges)]
        seen[name] = np.concatenate(parts)
    return seen


def interleaved(engine: Engine) -> Seen:
    """Slots of different lengths whose rows alternate: prefill beside decode, slots that come and go."""
    rng = np.random.default_rng(9)
    texts = [token_ids(engine, seed=20 + slot) for slot in range(5)]
    done = [0] * 5
    logits = []
    with engine.session(5, CONTEXT, poison=True) as session:
        for step in range(14):
            counts = rng.integers(0, 20, 5) if step % 3 else rng.integers(0, 2, 5)
            rows = [(slot, done[slot] + i) for slot in range(5) for i in range(counts[slot])]
            if not rows:
                continue
            # Any order between slots, positions ascending inside one.
            order = sorted(range(len(rows)), key=lambda i: (rows[i][1] - done[rows[i][0]], rng.random()))
            rows = [rows[i] for i in order]
            ids = [texts[slot][position] for slot, position in rows]
            logits.append(session.step(ids, [slot for slot, _ in rows], [position for _, position in rows]))
            done = [done[slot] + int(counts[slot]) for slot in range(5)]
    return {"logits": np.concatenate(logits)}


def rollback(engine: Engine) -> Seen:
    """Fork, truncate, save and restore: every copy goes on as the sequence it came from."""
    ids, other = token_ids(engine), token_ids(engine, seed=6)
    seen: Seen = {}
    with engine.session(4, CONTEXT, poison=True) as session:
        run_rows(session, ids[:140], 0, 0)
        session.fork(0, 1)
        seen["forked"] = run_rows(session, other[140:170], 1, 140)
        back = 140 - min(engine.info.rollback_rows, 9)
        session.truncate(0, back)
        seen["truncated"] = run_rows(session, other[back:200], 0, back)
        saved = session.save(1)
        session.restore(3, saved)
        session.reset(1)
        seen["restored"] = run_rows(session, ids[170:200], 3, 170)
        seen["reset"] = run_rows(session, other[:40], 1, 0)
    return seen


def some_rows(engine: Engine) -> Seen:
    """Logits of a few rows, and of none."""
    ids = token_ids(engine)[:90]
    with engine.session(1, CONTEXT, poison=True) as session:
        first = session.step(ids[:60], [0] * 60, list(range(60)), [59, 3, 17])
        none = session.step(ids[60:80], [0] * 20, list(range(60, 80)), [])
        last = session.step(ids[80:], [0] * 10, list(range(80, 90)), [9])
    assert none.shape[0] == 0
    return {"first": first, "last": last}


def sampling(engine: Engine) -> Seen:
    """Sampled ids: greedy, and draws with every kind of limit and a mask, which they keep to whatever the logits."""
    ids = token_ids(engine)[:64]
    vocab = engine.info.vocab_size
    rng = np.random.default_rng(3)
    settings = [
        Sampling(),
        Sampling(0.8, 0, 1.0, 1),
        Sampling(1.0, 5, 1.0, 2),
        Sampling(1.3, 0, 0.7, 3),
        Sampling(0.6, 40, 0.9, 4),
        Sampling(2.0, 1, 0.5, 5),
        Sampling(1.0, 0, 0.0, 6),
        Sampling(1.0, vocab + 7, 0.999, 2**63 + 11),
    ]
    masks = rng.random((8, vocab)) < 0.3
    masks[3] = False
    rows = [63, 0, 10, 20, 30, 40, 50, 60]
    seen: Seen = {}
    with engine.session(3, CONTEXT, poison=True) as session:
        positions = list(range(64))
        seen["free"] = session.sample(ids, [0] * 64, positions, rows, settings)
        seen["masked"] = session.sample(ids, [1] * 64, positions, rows, settings, masks)
        logits = session.step(ids, [2] * 64, positions, rows)
    assert seen["free"][0] == logits[0].argmax() and seen["free"][5] == logits[5].argmax()  # greedy; a top-k of 1
    for row, (allowed, chosen) in enumerate(zip(masks, seen["masked"], strict=True)):
        assert allowed[chosen] if allowed.any() else chosen == -1, row
    best_five = np.argsort(-logits[2], kind="stable")[:5]
    assert seen["free"][2] in best_five
    return seen


def long_context(engine: Engine) -> Seen:
    """To the end of the context (4,096 at most): chunks, then rows and single steps across its last positions."""
    end = min(4096, engine.info.max_context)
    ids = token_ids(engine, end)
    with engine.session(1, end, poison=True) as session:
        for start in range(0, end - 100, 1000):
            stop = min(start + 1000, end - 100)
            session.step(ids[start:stop], [0] * (stop - start), list(range(start, stop)), [])
        logits = [run_rows(session, ids[end - 100 : end - 6], 0, end - 100)]
        logits += [run_rows(session, ids[p : p + 1], 0, p) for p in range(end - 6, end)]
    return {"logits": np.concatenate(logits)}


def predict(engine: Engine, ids: Array, chunk: int = 64) -> tuple[Array, Array, Array]:
    """Argmax, gap and negative log likelihood [rows, tokens] of int32 `ids` [rows, tokens + 1]."""
    count, length = ids.shape[0], ids.shape[1] - 1
    parts: list[tuple[Array, ...]] = []
    with engine.session(count, length) as session:
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            positions = np.tile(np.arange(start, end), count)
            slots = np.repeat(np.arange(count), end - start)
            logits = session.step(ids[:, start:end].reshape(-1), slots, positions).reshape(count, end - start, -1)
            top = np.partition(logits, -2, axis=-1)[..., -2:].astype(np.float64)
            largest = logits.max(-1, keepdims=True)
            total = np.log(np.exp((logits - largest).astype(np.float64)).sum(-1)) + largest[..., 0]
            target = np.take_along_axis(logits, ids[:, start + 1 : end + 1, None].astype(np.int64), -1)[..., 0]
            parts.append((logits.argmax(-1).astype(np.int32), top[..., 1] - top[..., 0], total - target))
    best, gap, nll = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    return best, gap.astype(np.float32), nll


def predict_all(engine: Engine, ids: Array, slots: int) -> tuple[Array, Array, Array]:
    """`predict` for any number of rows, so many at a time."""
    parts = [predict(engine, ids[first : first + slots]) for first in range(0, len(ids), slots)]
    best, gap, nll = (np.concatenate(part) for part in zip(*parts, strict=True))
    return best, gap, nll


def row_errors(found: Array, expected: Array) -> Array:
    """Root mean square difference of every row, in units of the standard deviation of all logits."""
    return np.asarray(np.sqrt(np.mean((found - expected) ** 2, axis=-1)) / expected.std())


SCENARIOS: Mapping[str, Scenario] = {
    run.__name__: run
    for run in (prefill, single_steps, chunks, interleaved, rollback, some_rows, sampling, long_context)
}
