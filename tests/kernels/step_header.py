"""The step's header as kernels read it (dsv4c/kernels/cuda/step.cuh), and the runs behind it."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

HEADER_BYTES = 64
_FORMAT = "<8i4Q"


@dataclass(frozen=True)
class StepSizes:
    """T, R, S, B and M of a step."""

    tokens: int
    logits_rows: int
    slots: int = 1
    blocks: int = 1
    table_width: int = 1
    has_mask: bool = False


@dataclass(frozen=True)
class Runs:
    """For each row of the step, its run: the rows of one slot, in the order of the step."""

    first: tuple[int, ...]
    begin: tuple[int, ...]
    length: tuple[int, ...]
    rows: tuple[int, ...]


def find_runs(slots: Sequence[int], positions: Sequence[int]) -> Runs:
    """Runs in the order in which their slots appear."""
    members: dict[int, list[int]] = {}
    for row, slot in enumerate(slots):
        members.setdefault(slot, []).append(row)
    rows: list[int] = []
    first, begin, length = [0] * len(slots), [0] * len(slots), [0] * len(slots)
    for run in members.values():
        for row in run:
            first[row], begin[row], length[row] = positions[run[0]], len(rows), len(run)
        rows += run
    return Runs(tuple(first), tuple(begin), tuple(length), tuple(rows))


def pack_header(sizes: StepSizes, first: int, begin: int, length: int, rows: int) -> bytes:
    """The bytes of a StepHeader, nobody arrived; the runs are given by their addresses."""
    numbers = (sizes.tokens, sizes.logits_rows, sizes.slots, sizes.blocks, sizes.table_width, int(sizes.has_mask), 0, 0)
    data = struct.pack(_FORMAT, *numbers, first, begin, length, rows)
    assert len(data) == HEADER_BYTES
    return data
