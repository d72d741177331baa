"""Whole engines on the GPU against CPU engines of the same model and numerics, scenario by scenario.

In exact numerics both compute in float32, and only the order of sums differs. In the reference numerics a sum that is
added up in another order can fall on the other side of a rounding to bf16, e4m3 or e2m1, and such a step can send a row
to another expert or entry, so rows are compared one by one and a small share of them may differ.
"""

import numpy as np
import pytest

from dsv4c.runtime.engine import Engine
from tests.gpu.scenarios import CONTEXT, SCENARIOS, Array, predict, prefill, run_rows, token_ids

pytestmark = [pytest.mark.gpu, pytest.mark.sm90a]

Case = tuple[str, Engine, dict[str, Array]]

# Two sums of a few thousand float32 products, carried through six layers.
EXACT = 2e-4
# A typical row of the reference numerics; rows after a flipped choice differ by more.
TYPICAL_ROW = 0.06


def assert_close(name: str, found: Array, expected: Array) -> None:
    assert np.isfinite(found).all()
    if name.endswith("exact"):
        np.testing.assert_allclose(found, expected, atol=EXACT * max(1.0, float(np.abs(expected).max())))
        return
    error = np.sqrt(np.mean((found - expected) ** 2, axis=-1)) / expected.std()
    assert np.median(error) < TYPICAL_ROW, f"typical row {np.median(error):.3g}, largest {error.max():.3g}"


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "sampling"])
def test_scenario(case: Case, scenario: str) -> None:
    name, engine, seen = case
    for part, found in SCENARIOS[scenario](engine).items():
        assert_close(name, found, seen[f"{scenario}.{part}"])


def test_sampled_ids(case: Case) -> None:
    """Draws agree unless a logit that differs a little moves them across a border."""
    name, engine, seen = case
    for part, found in SCENARIOS["sampling"](engine).items():
        expected = seen[f"sampling.{part}"]
        if part == "masked":
            assert found[3] == expected[3] == -1
        if name.endswith("exact"):
            np.testing.assert_array_equal(found, expected)


def test_the_same_step_gives_the_same_bits(case: Case) -> None:
    _, engine, _ = case
    first = prefill(engine)["logits"]
    for _ in range(5):
        np.testing.assert_array_equal(prefill(engine)["logits"], first)


def test_a_step_without_a_graph_gives_the_same_bits(case: Case) -> None:
    _, engine, _ = case
    ids = token_ids(engine)[:70]
    with engine.session(1, CONTEXT) as session, engine.session(1, CONTEXT, graphs=False) as plain:
        for start, end in ((0, 40), (40, 41), (41, 42), (42, 70)):
            np.testing.assert_array_equal(
                run_rows(session, ids[start:end], 0, start), run_rows(plain, ids[start:end], 0, start)
            )


def test_traced_launches_are_finite(case: Case) -> None:
    _, engine, _ = case
    seen = []

    def watch(index: int, kernel: str, node: str, layer: int | None, outputs: list) -> None:  # type: ignore[type-arg]
        for output in outputs:
            if kernel != "select_entries":
                assert np.isfinite(output.to_float32()).all(), (kernel, node)
        seen.append(node)

    with engine.session(1, CONTEXT, poison=True) as session:
        session.trace(token_ids(engine)[:40], [0] * 40, list(range(40)), watch)
    assert len(seen) == len(set(seen)) > 20


def test_held_out_text(folder, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    """Teacher-forced over the held-out text: same argmax unless the oracle's best two logits are close."""
    with np.load(folder / "heldout.npz") as kept:
        oracle = {name: kept[name] for name in kept.files}
    with Engine.open(folder / "trained-reference.dsv4c") as engine:
        parts = [predict(engine, oracle["ids"][i : i + 16]) for i in range(0, len(oracle["ids"]), 16)]
    best, _, nll = (np.concatenate(part) for part in zip(*parts, strict=True))
    differs = best != oracle["best"]
    widest = float(oracle["gap"][differs].max(initial=0))
    ours, theirs = np.exp(nll.mean()), np.exp(oracle["nll"].mean())
    with capsys.disabled():
        print(
            f"\nheld-out: {best.size} positions, argmax differs at {differs.sum()} ({differs.mean():.3%}), largest gap "
            f"there {widest:.4f}; perplexity {ours:.5f} on the GPU, {theirs:.5f} on the CPU ({ours / theirs - 1:+.4%})"
        )
    assert abs(ours / theirs - 1) < 1e-3
    assert widest < 1.0
