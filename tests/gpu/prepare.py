"""Builds the engines of the GPU tests, and what CPU engines of the same numerics answer: run where there is no GPU.

    python -m tests.gpu.prepare build/gpu
    (on the machine with the GPU)  DSV4C_GPU_CASES=build/gpu pytest -m gpu tests/gpu

The folder is all that the tests need besides the runtime library; nothing is compiled where they run.
"""

import ctypes
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dsv4c.compiler import build_engine
from dsv4c.perplexity import read_texts, token_rows
from dsv4c.recipe import Numerics, Recipe
from dsv4c.runtime.engine import Engine
from dsv4c.runtime.library import load_library
from dsv4c.text import Tokenizer
from tests.fixtures import TINY_OFFICIAL, Quantization
from tests.gpu.scenarios import SCENARIOS, Array, kept, predict_all, row_errors
from tests.model_cases import checkpoint_of

# Bucket sizes that split the scenarios' steps in many ways, and are few enough to build quickly.
DECODE_BUCKETS = (1, 2, 4, 16)
MIXED_BUCKETS = (16, 64, 256, 1024)


@dataclass(frozen=True)
class GpuCase:
    """A model, by the names of tests/model_cases.py ("trained": the bundled checkpoint)."""

    model: str
    quantization: Quantization | None
    numerics: Numerics

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.model, self.quantization, self.numerics)))


CASES = (
    GpuCase("trained", None, "reference"),
    GpuCase("trained", None, "exact"),
    GpuCase("tiny", "fp8_fp4", "exact"),
    GpuCase("tiny", "fp8_fp4", "reference"),
    GpuCase("partial_blocks", "fp8_fp4", "exact"),
    GpuCase("partial_blocks", "fp8", "reference"),
    GpuCase("narrow", "bf16", "exact"),
)


def checkpoint(case: GpuCase) -> Path:
    return TINY_OFFICIAL if case.quantization is None else checkpoint_of(case.model, case.quantization)


def recipe(target: str, numerics: Numerics) -> Recipe:
    chosen = Recipe.for_target(target, None).with_overrides(numerics=numerics)
    return replace(chosen, decode_buckets=DECODE_BUCKETS, mixed_buckets=MIXED_BUCKETS)


def prepare(folder: Path, cases: tuple[GpuCase, ...] = CASES) -> Iterator[str]:
    """Writes `<case>.dsv4c` and `<case>.npz` of every case; yields a line as each is done."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        goldens = case.numerics == "reference"
        engine = folder / f"{case.name}.dsv4c"
        report = build_engine(checkpoint(case), recipe("h100", case.numerics), engine, goldens=goldens)
        record_answers(folder, case)
        warned = "".join(f"; {warning}" for warning in report.warnings)
        yield f"{case.name}: {report.size_bytes / 1e6:.1f} MB, {report.kernels} kernels{warned}"


def record_answers(folder: Path, case: GpuCase) -> None:
    """What the CPU engine answers, and how far it is from itself where its sums run in another order (`.spread`)."""
    path = folder / f"{case.name}.cpu"
    build_engine(checkpoint(case), recipe("cpu", case.numerics), path, goldens=False)
    answers: dict[str, Array] = {}
    with Engine.open(path) as engine:
        for scenario, run in SCENARIOS.items():
            with summation_order(0):
                seen = {f"{scenario}.{part}": kept(array, engine) for part, array in run(engine).items()}
            answers |= seen
            if case.numerics == "reference" and scenario != "sampling":
                with summation_order(1):
                    other = {f"{scenario}.{part}": kept(array, engine) for part, array in run(engine).items()}
                answers |= {f"{name}.spread": np.median(row_errors(other[name], seen[name])) for name in seen}
    path.unlink()
    np.savez_compressed(folder / f"{case.name}.npz", **answers)


def record_heldout(folder: Path, texts: Path, rows: int | None) -> str:
    """What the CPU engine predicts of a held-out text, teacher-forced, in the numerics of the `trained` case.

    Per position: the argmax, the gap between the two best logits and the negative log likelihood of the target; then
    `other`, the argmax where its sums run in another order.
    """
    path = folder / "heldout.cpu"
    build_engine(TINY_OFFICIAL, recipe("cpu", "reference"), path, goldens=False)
    with Engine.open(path) as engine:
        ids = token_rows(read_texts(texts), Tokenizer(engine.tokenizer_files()), engine.info)[:rows]
        with summation_order(0):
            best, gap, nll = predict_all(engine, ids, 4)
        with summation_order(1):
            other, _, other_nll = predict_all(engine, ids, 4)
    path.unlink()
    facts = {"ids": ids, "best": best, "gap": gap, "nll": nll, "other": other, "other_nll": other_nll.mean()}
    np.savez_compressed(folder / "heldout.npz", **facts)
    return f"heldout: {len(ids)} rows of {ids.shape[1] - 1} tokens"


@contextmanager
def summation_order(number: int) -> Iterator[None]:
    """Runs the CPU kernels with the widest vectors of this processor (0) or the next (1), whose sums run otherwise."""
    library = load_library()
    library.dsv4c_testing_simd_name.restype = ctypes.c_char_p
    library.dsv4c_testing_use_simd(library.dsv4c_testing_simd_name(number))
    yield
    library.dsv4c_testing_use_simd(None)


def main() -> None:
    folder = Path(sys.argv[1])
    for line in prepare(folder):
        print(line, flush=True)
    if len(sys.argv) > 2:
        print(record_heldout(folder, Path(sys.argv[2]), None))
    (folder / "cases.json").write_text(json.dumps([case.name for case in CASES]))


if __name__ == "__main__":
    main()
