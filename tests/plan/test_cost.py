"""Bytes and operations of launches, counted by hand."""

import pytest

from dsv4c.plan.cost import distinct_experts, launch_cost, tensor_bytes
from dsv4c.plan.execution_plan import Arg, TensorRef
from dsv4c.step_abi import Dim, DType, Space
from tests.graph.small_models import plan


def ref(*sizes: int, dtype: DType = DType.F32, space: Space = Space.ARENA, strides: tuple[int, ...] = ()) -> TensorRef:
    dense = strides or tuple(_product(sizes[i + 1 :]) for i in range(len(sizes)))
    return TensorRef(space, dtype, 0, sizes, dense, (Dim.FIXED,) * len(sizes))


def _product(sizes: tuple[int, ...]) -> int:
    return sizes[0] * _product(sizes[1:]) if sizes else 1


def test_a_broadcast_counts_once() -> None:
    assert tensor_bytes(ref(3, 4, 5, strides=(5, 0, 1))) == 3 * 5 * 4
    assert tensor_bytes(ref(3, 5, dtype=DType.F4E2M1X2)) == 15


def test_linear() -> None:
    x, out = ref(3, 64, dtype=DType.BF16), ref(3, 10)
    args: list[Arg] = [x, ref(10, 64, dtype=DType.F8E4M3), ref(1, 1, dtype=DType.F8E8M0), 128, 128, 1]
    assert launch_cost("linear", args, [out]) == (3 * 64 * 2 + 640 + 1 + 3 * 10 * 4, 2 * 3 * 10 * 64)
    # A packed weight has two columns a byte.
    args = [x, ref(10, 32, dtype=DType.F4E2M1X2), ref(10, 2, dtype=DType.F8E8M0), 1, 32, 1]
    assert launch_cost("linear", args, [out]) == (3 * 64 * 2 + 320 + 20 + 3 * 10 * 4, 2 * 3 * 10 * 64)


def test_grouped_linear_multiplies_one_group_a_row() -> None:
    args: list[Arg] = [ref(3, 64), ref(8, 32), None, 0, 0, 2]
    assert launch_cost("grouped_linear", args, [ref(3, 8)])[1] == 2 * 3 * 8 * 32


@pytest.mark.parametrize(("tokens", "expected"), [(1, 2.0), (2, 10 * (1 - 0.8**2)), (1000, 10.0)])
def test_distinct_experts(tokens: int, expected: float) -> None:
    assert distinct_experts(10, tokens, 2) == pytest.approx(expected)


def test_moe_ffn_reads_the_experts_that_are_hit() -> None:
    def args(tokens: int) -> list[Arg]:
        stacks: list[Arg] = [ref(10, 16, 32), None, ref(10, 32, 8), None]
        return [ref(tokens, 32), ref(tokens, 2, dtype=DType.I32), ref(tokens, 2), *stacks, 0, 0, 1.0, 0]

    experts = 10 * (16 * 32 + 32 * 8) * 4
    moved, flops = launch_cost("moe_ffn", args(1), [ref(1, 32)])
    # One token hits 2 of 10; its row, ids, weights and result.
    assert moved == experts * 2 // 10 + 128 + 8 + 8 + 128
    # Three matrices of 8 by 32, two experts.
    assert flops == 2 * 1 * 2 * 3 * 8 * 32
    assert launch_cost("moe_ffn", args(500), [ref(500, 32)])[0] == experts + 500 * (128 + 8 + 8 + 128)


def test_placed_experts_read_what_is_hit_and_the_rows_of_the_table() -> None:
    def args(tokens: int, hashed: bool) -> list[Arg]:
        table, ids = ref(1000, 2, dtype=DType.I64), ref(tokens, dtype=DType.I32)
        routing: list[Arg] = [None, table, ids] if hashed else [ref(10), None, None]
        packed, topology = ref(10, 5000, dtype=DType.F4E2M1X2, strides=(8192, 1)), ref(2, 30, dtype=DType.I32)
        x = ref(tokens, 256, dtype=DType.BF16)
        return [x, ref(tokens, 10), *routing, packed, topology, 128, 2, 1.5, 10.0, 4]

    each = 512 + 40 + 1024
    assert launch_cost("placed_experts", args(1, False), [ref(1, 256)]) == (
        2 * 5000 + each + 40 + 240,
        2 * 1 * 2 * 3 * 128 * 256,
    )
    moved, _ = launch_cost("placed_experts", args(500, True), [ref(500, 256)])
    assert moved == 10 * 5000 + 500 * (each + 4 + 2 * 8) + 240


def test_attention_reads_the_window_and_the_selection() -> None:
    ring = ref(0, 28, 48, dtype=DType.U8, space=Space.STATE)
    rows, inputs = 2, [ref(2, dtype=DType.I32, space=Space.INPUT)] * 2 + [ref(0, 0, dtype=DType.I32)]
    q, kv, selected = ref(rows, 4, 40), ref(rows, 40), ref(rows, 3, dtype=DType.I32)
    args: list[Arg] = [q, kv, ring, None, ring, None, selected, ref(4), *inputs, 20, 4, 8, 0.1]
    moved, flops = launch_cost("attention", args, [ref(rows, 4, 40)])
    others = 2 * rows * 160 * 4 + rows * 40 * 4 + rows * 3 * 4 + 16 + 2 * 8
    assert moved == others + rows * (20 + 3) * 48
    # Two products of 40 a key and head.
    assert flops == 2 * 2 * rows * 4 * 23 * 40
    window: list[Arg] = [q, kv, ring, None, None, None, None, ref(4), *inputs, 20, 1, 8, 0.1]
    assert launch_cost("attention", window, [ref(rows, 4, 40)])[1] == 2 * 2 * rows * 4 * 20 * 40


def test_select_entries_reads_the_selected_keys() -> None:
    keys = ref(0, 64, 16, space=Space.STATE)
    at = [ref(2, dtype=DType.I32), ref(2, dtype=DType.I32), ref(0, 0, dtype=DType.I32)]
    args: list[Arg] = [ref(2, 3, 16), ref(2, 3), keys, None, *at, 5, 4, 0.1]
    moved, flops = launch_cost("select_entries", args, [ref(2, 5, dtype=DType.I32)])
    assert moved == (96 + 6) * 4 + 16 + 40 + 2 * 5 * 64
    assert flops == 2 * 2 * 5 * 3 * 16


def test_lookups_read_their_rows_only() -> None:
    moved, flops = launch_cost("embedding", [ref(2, dtype=DType.I32), ref(1000, 8), 1], [ref(2, 8)])
    assert (moved, flops) == (8 + 2 * 2 * 32, 0)


def test_the_mixer_multiplies_its_matrix() -> None:
    args: list[Arg] = [ref(3, 2, 16), ref(8, 32), ref(3), ref(8), 3, 1e-6, 1e-6]
    outputs = [ref(3, 16), ref(3, 2), ref(3, 2, 2)]
    assert launch_cost("mhc_mix", args, outputs) == (4 * (96 + 256 + 11 + 48 + 6 + 12), 2 * 3 * 256)


def test_element_wise_launches_count_their_results() -> None:
    assert launch_cost("add", [ref(3, 5), ref(3, 5), 1], [ref(3, 5)]) == (180, 15)


def test_a_step_reads_less_than_all_weights_and_more_for_more_rows() -> None:
    made = plan("narrow", "exact")
    moved = [sum(launch.bytes_moved for launch in bucket.launches) for bucket in made.buckets]
    assert moved == sorted(moved) and 0 < moved[0] < made.weights.size_bytes
    assert all(launch.bytes_moved > 0 for bucket in made.buckets for launch in bucket.launches if launch.outputs)
