"""Builds the engines of the GPU tests, and what CPU engines of the same numerics answer: run where there is no GPU.

    python -m tests.gpu.prepare build/gpu
    (on the machine with the GPU)  DSV4C_GPU_CASES=build/gpu pytest -m gpu tests/gpu

The folder is all that the tests need besides the runtime library; nothing is compiled where they run.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dsv4c.compiler import build_engine
from dsv4c.perplexity import read_texts, token_rows
from dsv4c.recipe import Numerics, Recipe
from dsv4c.runtime.engine import Engine
from dsv4c.text import Tokenizer
from tests.fixtures import TINY_OFFICIAL, Quantization
from tests.gpu.scenarios import SCENARIOS, predict
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
        source = checkpoint(case)
        goldens = case.numerics == "reference"
        report = build_engine(source, recipe("h100", case.numerics), folder / f"{case.name}.dsv4c", goldens=goldens)
        cpu_engine = folder / f"{case.name}.cpu"
        build_engine(source, recipe("cpu", case.numerics), cpu_engine, goldens=False)
        seen = {}
        with Engine.open(cpu_engine) as engine:
            for scenario, run in SCENARIOS.items():
                seen |= {f"{scenario}.{part}": array for part, array in run(engine).items()}
        cpu_engine.unlink()
        np.savez_compressed(folder / f"{case.name}.npz", **seen)
        warned = "".join(f"; {warning}" for warning in report.warnings)
        yield f"{case.name}: {report.size_bytes / 1e6:.1f} MB, {report.kernels} kernels{warned}"


def record_heldout(folder: Path, texts: Path, rows: int | None) -> str:
    """What the CPU engine predicts of a held-out text, teacher-forced, in the numerics of the `trained` case.

    Per position: the argmax, the gap between the two best logits and the negative log likelihood of the target.
    """
    engine_path = folder / "heldout.cpu"
    build_engine(TINY_OFFICIAL, recipe("cpu", "reference"), engine_path, goldens=False)
    best, gap, nll = [], [], []
    with Engine.open(engine_path) as engine:
        ids = token_rows(read_texts(texts), Tokenizer(engine.tokenizer_files()), engine.info)[:rows]
        for batch in range(0, len(ids), 4):
            found = predict(engine, ids[batch : batch + 4])
            for into, part in zip((best, gap, nll), found, strict=True):
                into.append(part)
    engine_path.unlink()
    np.savez_compressed(
        folder / "heldout.npz", ids=ids, best=np.concatenate(best), gap=np.concatenate(gap), nll=np.concatenate(nll)
    )
    return f"heldout: {len(ids)} rows of {ids.shape[1] - 1} tokens"


def main() -> None:
    folder = Path(sys.argv[1])
    for line in prepare(folder):
        print(line, flush=True)
    if len(sys.argv) > 2:
        print(record_heldout(folder, Path(sys.argv[2]), None))
    (folder / "cases.json").write_text(json.dumps([case.name for case in CASES]))


if __name__ == "__main__":
    main()
