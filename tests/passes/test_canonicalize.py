"""Equal things get one form."""

import torch
from torch.testing import FileCheck

from dsv4c.graph.annotations import set_flags
from dsv4c.graph.printer import format_graph
from dsv4c.passes.canonicalize import canonicalize
from dsv4c.step_abi import LaunchFlag
from tests.graph.scratch import Scratch
from tests.graph.small_models import context, walk

aten, dsv4 = torch.ops.aten, torch.ops.dsv4


def test_what_changes_nothing_goes() -> None:
    s = Scratch()
    x = s.rows("x", 2, 4)
    same = s.call("same", aten.reshape.default, x, [-1, 2, 4])
    cast = s.call("cast", aten._to_copy.default, same, dtype=torch.float32)
    flat = s.call("flat", aten.reshape.default, cast, [-1, 8])
    back = s.call("back", aten.reshape.default, flat, [-1, 2, 4])
    half = s.call("half", aten._to_copy.default, cast, dtype=torch.bfloat16)
    gm = s.finish(back, half)
    value = torch.randn(3, 2, 4)
    before = gm(value)
    assert canonicalize(gm, context()).modified
    assert format_graph(gm) == (
        "%x : float32[T, 2, 4] = input 0\n"
        "%flat : float32[T, 8] = aten.reshape(%x, [-1, 8])\n"
        "%back : float32[T, 2, 4] = aten.reshape(%flat, [-1, 2, 4])\n"
        "%half : bfloat16[T, 2, 4] = aten._to_copy(%x, dtype=bfloat16)\n"
        "return [%back, %half]\n"
    )
    gm.recompile()
    assert all(torch.equal(a, b) for a, b in zip(before, gm(value), strict=True))
    assert not canonicalize(gm, context()).modified


def test_a_repeated_call_is_made_once() -> None:
    s = Scratch()
    x, w = s.rows("x", 4), s.weight("w", 4, 4)
    first = s.call("first", aten.linear.default, x, w)
    second = s.call("second", aten.linear.default, x, w)
    left, right = (s.call(name, aten.silu.default, y) for name, y in (("left", first), ("right", second)))
    gm = s.finish(s.call("total", aten.add.Tensor, left, right))
    assert canonicalize(gm, context()).modified
    FileCheck().run(
        """
        # CHECK: %first : float32[T, 4] = aten.linear(%x, %w)
        # CHECK-NEXT: %left : float32[T, 4] = aten.silu(%first)
        # CHECK-NEXT: %total : float32[T, 4] = aten.add(%left, %left)
        # CHECK-NEXT: return [%total]
        """,
        format_graph(gm),
    )


def test_near_misses_stay() -> None:
    s = Scratch()
    x = s.rows("x", 4)
    one, true = s.call("one", aten.add.Tensor, x, 1), s.call("true", aten.add.Tensor, x, 1.0)
    other = s.call("other", aten.add.Tensor, x, 2)
    always, head = (s.call(name, aten.silu.default, x) for name in ("always", "head"))
    set_flags(head, LaunchFlag.HEAD)
    half = s.call("half", aten._to_copy.default, x, dtype=torch.bfloat16)
    full = s.call("full", aten._to_copy.default, x, dtype=torch.float16)
    # Not aten: a pass may not know what an operator of dsv4 writes to.
    rounded = [s.call("rounded", dsv4.fp8_round.default, x, 64, 4) for _ in range(2)]
    gm = s.finish(one, true, other, always, head, half, full, *rounded)
    text = format_graph(gm)
    assert not canonicalize(gm, context()).modified
    assert format_graph(gm) == text


def test_on_the_model() -> None:
    """The builder writes every projection's widening of one input; exact numerics have no casts at all."""
    stage = walk("partial_blocks", "reference", "fp8_fp4").stages["canonicalize"]
    FileCheck().check("%l1_kv_proj_f32 : float32[T, 192] = aten._to_copy(%l1_attn_norm_bf16").run(stage.before)
    FileCheck().check_not("l1_kv_proj_f32").check("aten.linear(%l1_q_a_f32, %p_layers_1_attn_wkv)").run(stage.after)
    assert all(torch.equal(a, b) for a, b in zip(stage.logits_before, stage.logits_after, strict=True))
    assert not walk("narrow", "exact", "fp8_fp4").stages["canonicalize"].modified
