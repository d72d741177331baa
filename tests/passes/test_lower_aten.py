"""aten becomes operators that have kernels; a form that none of them has stays, for the plan to refuse."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import Node
from torch.testing import FileCheck

from dsv4c.graph.printer import format_graph
from dsv4c.passes.lower_aten import lower_aten
from dsv4c.passes.pass_manager import run_passes
from tests.graph.scratch import Scratch
from tests.graph.small_models import context, max_difference, walk

aten = torch.ops.aten
BF16 = torch.bfloat16


def test_casts_become_the_rounding_of_the_kernel() -> None:
    s = Scratch()
    ids = s.rows("ids", dtype=torch.int32)
    table, w, norm = s.weight("table", 9, 6), s.weight("w", 4, 6), s.weight("norm", 4)
    rows = s.rows("rows", dtype=torch.int32)
    x = s.cast("x", s.call("x", aten.embedding.default, table, ids), BF16)
    y = s.cast("y", s.call("y", aten.linear.default, s.f32("x_wide", x), w), BF16)
    z = s.cast("z", s.call("z", aten.rms_norm.default, s.f32("y_wide", y), [4], norm, 1e-6), BF16)
    total = s.call("total", aten.add.Tensor, s.f32("y_again", y), s.f32("z_wide", z))
    picked = s.call("picked", aten.index_select.default, total, 0, rows)
    wide = s.call("wide", aten.linear.default, s.f32("x_again", x), w)
    gm = s.finish(picked, wide)
    ids_value = torch.tensor([3, 0], dtype=torch.int32)
    values = [ids_value, torch.randn(9, 6), torch.randn(4, 6), torch.randn(4), torch.tensor([1], dtype=torch.int32)]
    before = gm(*values)
    gm = run_passes(gm, [lower_aten], context())
    FileCheck().run(
        """
        # CHECK: %x : bfloat16[T, 6] = dsv4.embedding(%ids, %table, bfloat16)
        # CHECK-NEXT: %y : bfloat16[T, 4] = dsv4.linear(%x, %w, None, 0, 0, bfloat16)
        # CHECK-NEXT: %z : bfloat16[T, 4] = dsv4.rms_norm(%y, %norm, 1e-06)
        # CHECK-NEXT: %total : float32[T, 4] = dsv4.add(%y, %z, float32)
        # CHECK-NEXT: %picked : float32[T, 4] = dsv4.gather_rows(%total, %rows)
        # CHECK-NEXT: %wide : float32[T, 4] = dsv4.linear(%x, %w, None, 0, 0, float32)
        """,
        format_graph(gm),
    )
    for old, new in zip(before, gm(*values), strict=True):
        torch.testing.assert_close(new, old)
    assert not lower_aten(gm, context()).modified


def biased_linear(s: Scratch, x: Node) -> Node:
    return s.call("y", aten.linear.default, x, s.weight("w", 4, 4), s.weight("bias", 4))


def norm_of_two_axes(s: Scratch, x: Node) -> Node:
    wide = s.call("wide", aten.reshape.default, x, [-1, 2, 2])
    return s.call("y", aten.rms_norm.default, wide, [2, 2], None, 1e-6)


def scaled_sum(s: Scratch, x: Node) -> Node:
    return s.call("y", aten.add.Tensor, x, x, alpha=2)


def sum_with_a_number(s: Scratch, x: Node) -> Node:
    return s.call("y", aten.add.Tensor, x, 1.0)


def broadcast_sum(s: Scratch, x: Node) -> Node:
    return s.call("y", aten.add.Tensor, x, s.weight("w", 4))


def selected_columns(s: Scratch, x: Node) -> Node:
    return s.call("y", aten.index_select.default, x, 1, s.rows("columns", dtype=torch.int32))


MISSES = [biased_linear, norm_of_two_axes, scaled_sum, sum_with_a_number, broadcast_sum, selected_columns]


@pytest.mark.parametrize("write", MISSES)
def test_near_misses_stay(write: Callable[[Scratch, Node], Node]) -> None:
    s = Scratch()
    gm = s.finish(write(s, s.rows("x", 4)))
    text = format_graph(gm)
    assert not lower_aten(gm, context()).modified
    assert format_graph(gm) == text


def test_a_result_that_is_used_wide_and_narrow_keeps_its_cast() -> None:
    s = Scratch()
    y = s.call("y", aten.linear.default, s.rows("x", 4), s.weight("w", 4, 4))
    gm = s.finish(y, s.cast("y", y, BF16))
    assert lower_aten(gm, context()).modified
    FileCheck().check("float32[T, 4] = dsv4.linear(%x, %w, None, 0, 0, float32)").check("aten._to_copy(%y").run(
        format_graph(gm)
    )


@pytest.mark.parametrize("numerics", ["exact", "reference"])
def test_on_the_model(numerics: str) -> None:
    """Only views are left of aten, and not one cast."""
    stage = walk("narrow", numerics, "fp8_fp4").stages["lower_aten"]  # type: ignore[arg-type]
    left = {line.split(" = ")[1].split("(")[0] for line in stage.after.splitlines() if " = aten." in line}
    assert left == {"aten.reshape", "aten.unsqueeze", "aten.expand"}
    FileCheck().check("aten.linear").check("aten.rms_norm").run(stage.before)
    dtype = "float32" if numerics == "exact" else "bfloat16"
    FileCheck().run(
        f"""
        # CHECK: %embedded : {dtype}[T, 96] = dsv4.embedding(%token_ids, %p_embed, {dtype})
        # CHECK: %l1_q_a : {dtype}[T, 48] = dsv4.linear(%l1_attn_norm, %p_layers_1_attn_wq_a, None, 0, 0, {dtype})
        # CHECK: %l1_compress_kv : float32[T, 80] = dsv4.linear(%l1_attn_norm,
        # CHECK: %l1_ffn_sum : {dtype}[T, 96] = dsv4.add(%l1_moe_ffn, %l1_shared_down, {dtype})
        # CHECK: %head_streams : {dtype}[R, 2, 96] = dsv4.gather_rows(
        # CHECK: %logits : float32[R, 97] = dsv4.linear(%head_norm, %p_head, None, 0, 0, float32)
        """,
        stage.after,
    )
    assert max_difference(stage.logits_before, stage.logits_after) <= 1e-5
