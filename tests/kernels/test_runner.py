"""The runner itself: what it hands to a selector, and that it finds what a kernel must not write."""

from dataclasses import replace

import pytest
import torch

from dsv4c.kernels.select.selection import Selection, cuda_variant
from dsv4c.plan.execution_plan import KernelCall, Launch
from dsv4c.step_abi import Dim, DType
from tests.kernels import runner
from tests.kernels.runner import run_operator
from tests.kernels.step_header import HEADER_BYTES, StepSizes, find_runs, pack_header
from tests.kernels.step_memory import POISON, StepMemory, view

ROWS = (Dim.TOKENS, Dim.FIXED)


def test_rows_behind_those_of_the_step_are_poison() -> None:
    memory = StepMemory()
    x = torch.arange(12.0).view(3, 4)
    ref = memory.place("x", x, ROWS, capacity=5)
    assert (ref.sizes, ref.strides, ref.dims) == ((5, 4), (4, 1), ROWS)
    buffer = memory.build(memory.size_bytes + 256)
    assert torch.equal(view(buffer, ref, (3, 4)), x)
    assert bool(view(buffer, ref, (5, 4))[3:].isnan().all())
    assert bool((buffer[: ref.offset] == POISON).all()) and bool((buffer[memory.size_bytes :] == POISON).all())


def test_strides_and_alignment_of_a_view_stay() -> None:
    memory = StepMemory()
    merged = torch.arange(60.0).view(3, 20)
    columns = memory.place("columns", merged[:, 3:8], ROWS, capacity=4)
    assert columns.strides == (20, 1) and columns.offset % 256 == 12
    streams = memory.place("streams", merged.unsqueeze(1).expand(3, 4, 20), (*ROWS, Dim.FIXED), capacity=4)
    assert streams.strides == (20, 0, 1) and streams.offset % 256 == 0
    buffer = memory.build(memory.size_bytes)
    assert torch.equal(view(buffer, columns, (3, 5)), merged[:, 3:8])
    assert torch.equal(view(buffer, streams, (3, 4, 20)), merged.unsqueeze(1).expand(3, 4, 20))


def test_sizes_of_the_session_are_unknown_to_a_launch() -> None:
    memory = StepMemory()
    ring = memory.place("ring", torch.zeros(2, 16, 8), (Dim.SLOTS, Dim.FIXED, Dim.FIXED), capacity=4)
    table = memory.place("block_table", torch.zeros(2, 3, dtype=torch.int32), (Dim.SLOTS, Dim.TABLE), capacity=4)
    assert ring.sizes == (0, 16, 8) and table.sizes == (0, 0)


def test_a_write_outside_the_results_is_named() -> None:
    memory = StepMemory()
    memory.place("first", torch.zeros(8), (Dim.FIXED,), capacity=1)
    second = memory.place("second", torch.zeros(8), (Dim.FIXED,), capacity=1)
    before = memory.build(memory.size_bytes + 256)
    after = before.clone()
    after[second.offset + 33] ^= 1
    with pytest.raises(AssertionError, match="33 bytes from the start of second"):
        memory.check_untouched(before, after)


def test_a_row_that_is_not_of_the_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = runner.find_selector("hadamard")

    def one_row_more(launch: Launch, selection: Selection) -> list[KernelCall]:
        (call,) = right(launch, selection)
        constants = dict(call.variant.constants) | {"ROWS": "tokens + 1"}
        return [replace(call, variant=cuda_variant("row_chain", "row_chain", **constants))]

    monkeypatch.setattr(runner, "find_selector", lambda name: one_row_more)
    with pytest.raises(
        AssertionError, match=r"memory was written that is no result: byte \d+, 128 bytes from .* output 0"
    ):
        run_operator("hadamard", torch.ones(2, 16), capacity=4)


def test_header_bytes() -> None:
    header = pack_header(StepSizes(3, 2, 4, 5, 6, True), 16, 32, 48, 64)
    assert len(header) == HEADER_BYTES
    assert torch.frombuffer(bytearray(header[:32]), dtype=torch.int32).tolist() == [3, 2, 4, 5, 6, 1, 0, 0]
    assert torch.frombuffer(bytearray(header[32:]), dtype=torch.int64).tolist() == [16, 32, 48, 64]


def test_runs_of_interleaved_slots() -> None:
    runs = find_runs([3, 1, 3, 1, 3, 0], [7, 0, 8, 1, 9, 5])
    assert runs.first == (7, 0, 7, 0, 7, 5)
    assert runs.begin == (0, 3, 0, 3, 0, 5)
    assert runs.length == (3, 2, 3, 2, 3, 1)
    assert runs.rows == (0, 2, 4, 1, 3, 5)


def test_scratch_lies_behind_the_arena() -> None:
    selection = Selection(runner.TARGETS["h100"], 132, 4, 1000)
    first, second = selection.scratch(DType.F32, 3, 5), selection.scratch(DType.BF16, 7)
    assert (first.offset, second.offset, selection.scratch_bytes) == (1024, 1280, 512)
