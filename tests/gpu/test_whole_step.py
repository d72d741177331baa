"""Whole engines on the GPU against CPU engines of the same model and numerics, scenario by scenario.

In exact numerics both compute in float32, and only the order of sums differs. In the reference numerics a sum that is
added up in another order can fall on the other side of a rounding to bf16, e4m3 or e2m1, and such a step can send a row
to another expert or entry. How far that leads is the model's own matter, and was measured where the answers were
recorded: on two sets of CPU kernels that differ in nothing but the order of sums (`.spread`). The GPU may be about as
as far from the CPU as the CPU is from itself.
"""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from dsv4c.runtime.engine import Engine
from tests.gpu.scenarios import (
    CONTEXT,
    SCENARIOS,
    Array,
    kept,
    predict_all,
    prefill,
    row_errors,
    run_rows,
    token_ids,
)
from tests.kernels.device import device

pytestmark = [pytest.mark.gpu, pytest.mark.sm90a]

Case = tuple[str, Engine, dict[str, Array]]

# Two sums of a few thousand float32 products, carried through six layers.
EXACT = 2e-4
# Allowed multiple of the distance between two summation orders (the largest of a model's scenarios: some have few
# rows), and what is added where that happens to be small.
SPREADS, LEAST_SPREAD = 1.5, 0.02


def assert_close(name: str, found: Array, expected: Array, spread: float) -> None:
    if name.endswith("exact"):
        np.testing.assert_allclose(found, expected, atol=EXACT * max(1.0, float(np.abs(expected).max())))
        return
    error = row_errors(found, expected)
    allowed = SPREADS * spread + LEAST_SPREAD
    assert np.median(error) <= allowed, f"typical row {np.median(error):.3g}, {allowed:.3g} allowed"


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "sampling"])
def test_scenario(case: Case, scenario: str) -> None:
    name, engine, seen = case
    spread = max((float(value) for key, value in seen.items() if key.endswith(".spread")), default=0.0)
    for part, found in SCENARIOS[scenario](engine).items():
        assert np.isfinite(found).all()
        assert_close(name, kept(found, engine), seen[f"{scenario}.{part}"], spread)


def test_sampled_ids(case: Case) -> None:
    """In exact numerics the very ids of the CPU; in both, ids that the scenario itself finds allowed."""
    name, engine, seen = case
    for part, found in SCENARIOS["sampling"](engine).items():
        expected = seen[f"sampling.{part}"]
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


def test_held_out_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Teacher-forced over the held-out text: argmax and perplexity beside those of the CPU and of its other order."""
    with np.load(folder / "heldout.npz") as kept_facts:
        oracle = {name: kept_facts[name] for name in kept_facts.files}
    with Engine.open(folder / "trained-reference.dsv4c") as engine:
        best, _, nll = predict_all(engine, oracle["ids"], 16)
    lines, found = [], {}
    for who, chosen, mean in (("GPU", best, nll.mean()), ("CPU, other order", oracle["other"], oracle["other_nll"])):
        differs = chosen != oracle["best"]
        gaps = oracle["gap"][differs]
        perplexity = float(np.exp(mean) / np.exp(oracle["nll"].mean(dtype=np.float64)) - 1)
        found[who] = (differs.mean(), (differs & (oracle["gap"] > 0.5)).mean(), gaps.max(initial=0), perplexity)
        lines.append(
            f"held-out, {who}: argmax differs at {differs.mean():.3%} of {differs.size} positions; at "
            f"{(differs & (oracle['gap'] > 0.5)).mean():.4%} the oracle's gap is above 0.5, the largest is "
            f"{gaps.max(initial=0):.3f}; perplexity {perplexity:+.4%}"
        )
    with capsys.disabled():
        print("", *lines, sep="\n")
    share, share_of_wide, widest, perplexity = found["GPU"]
    other_share, other_wide, other_widest, _ = found["CPU, other order"]
    assert abs(perplexity) < 1e-3
    assert share <= SPREADS * other_share and share_of_wide <= SPREADS * other_wide + 1e-4
    assert widest <= other_widest + 0.5


def free_bytes() -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value


def test_memory_is_given_back(folder: Path) -> None:
    """Sessions and engines that come and go leave nothing on the card."""
    device().synchronize()  # a context to ask in, which stays
    path = folder / "trained-reference.dsv4c"
    left = []
    for _ in range(6):
        with Engine.open(path) as engine:
            for _ in range(4):
                prefill(engine)
        left.append(free_bytes())
    assert left[-1] >= left[1]
