"""Largest logit difference between exact engines and transformers in fp32, as CSV rows on stdout.

python -m tests.benchmarks.parity

A row is one of the random models of tests/test_parity.py: three sequences of 300 tokens, each prefilled as a whole, and
the logits of every row.
"""

import argparse
import csv
import sys
from dataclasses import asdict, dataclass, fields

import numpy as np
import torch

from dsv4c.runtime.engine import Engine
from tests.model_cases import ModelCase, parity_case
from tests.test_parity import CASES


@dataclass(frozen=True)
class Row:
    config: str
    quantization: str
    rows: int
    max_abs_difference: float


def largest_difference(case: ModelCase) -> float:
    sequences, tokens = case.ids.shape
    with Engine.open(case.engine) as engine:
        session = engine.session(slots=sequences, context=tokens)
        return max(
            float(np.abs(session.step(ids, [slot] * tokens, np.arange(tokens)) - expected).max())
            for slot, (ids, expected) in enumerate(zip(case.ids, case.logits, strict=True))
        )


def main() -> None:
    argparse.ArgumentParser(description="largest logit difference from transformers, as CSV").parse_args()
    # As in the tests: more threads gain nothing on models this small.
    torch.set_num_threads(1)
    writer = csv.DictWriter(sys.stdout, [field.name for field in fields(Row)])
    writer.writeheader()
    for config, quantization in CASES:
        case = parity_case(config, quantization)
        row = Row(config, quantization, case.ids.size, float(f"{largest_difference(case):.3g}"))
        writer.writerow(asdict(row))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
