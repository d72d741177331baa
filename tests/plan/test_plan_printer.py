"""The text form of a plan."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch.testing import FileCheck

from dsv4c.graph.annotations import Numerics
from dsv4c.plan.execution_plan import DENSE, EntryPoint, TensorRef
from dsv4c.plan.printer import format_arg, format_plan
from dsv4c.step_abi import Dim, DType, Space
from tests.graph.small_models import plan


def test_arguments() -> None:
    fixed, tokens = Dim.FIXED, Dim.TOKENS
    arena = TensorRef(Space.ARENA, DType.BF16, 64, (4, 8), (8, 1), (tokens, fixed))
    assert format_arg(arena) == "arena+64 bf16[T, 8]"
    assert format_arg(replace(arena, strides=(20, 1))) == "arena+64 bf16[T, 8] strides [20, 1]"
    plane = TensorRef(Space.STATE, DType.U8, 0, (0, 6, 48), (288, 48, 1), (Dim.SLOTS, fixed, fixed), 3)
    assert format_arg(plane) == "state3+0 u8[S, 6, 48]"
    table = TensorRef(Space.INPUT, DType.I32, 0, (0, 0), (DENSE, 1), (Dim.SLOTS, Dim.TABLE), 3)
    assert format_arg(table) == "input3+0 i32[S, M]"
    assert [format_arg(arg) for arg in (None, 128, 0.5)] == ["None", "128", "0.5"]


def test_head_and_launches() -> None:
    made = plan("one_layer", "exact")
    FileCheck().run(
        """
        # CHECK: state 0 %s_l0_ring: 28 rows of 160 bytes a slot
        # CHECK: state 2 %s_l0_entries: 64 rows of 160 bytes a block
        # CHECK: bucket decode 1: 36 launches, arena
        # CHECK: 0 %embedded = embedding(input0+0 i32[T], weight+0 f32[97, 96], 1) -> arena+
        # CHECK: %l0_commit = commit_ring(
        # CHECK-SAME: -> ()
        # CHECK: %sampled = sample(output0+0 f32[R, 97],
        # CHECK-SAME: -> output1+0 i32[R] only HEAD|SAMPLE
        # CHECK: bucket decode 4:
        # CHECK: bucket mixed 32:
        """,
        format_plan(made),
    )


@pytest.mark.parametrize("numerics", ["exact", "reference"])
def test_golden(numerics: Numerics, golden: Callable[[str, str], None]) -> None:
    made = plan("tiny", numerics)
    decode = replace(made, entry_points=(EntryPoint("main", made.buckets[:1]),))
    golden(f"plan/tiny-{numerics}-decode-1.txt", format_plan(decode))
