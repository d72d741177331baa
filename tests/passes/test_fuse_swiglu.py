"""The gate of the shared expert becomes one operator that rounds its result itself."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.testing import FileCheck

from dsv4c.graph.printer import format_graph
from dsv4c.passes.fuse_swiglu import fuse_swiglu
from tests.graph.scratch import Scratch
from tests.graph.small_models import context, max_difference, walk

aten = torch.ops.aten


def gated(dtype: torch.dtype, users: int = 1) -> tuple[GraphModule, dict[str, Node]]:
    s = Scratch()
    gate, up = s.rows("gate", 5), s.rows("up", 5)
    low = s.call("low", aten.clamp_max.default, gate, 2.0)
    both = s.call("both", aten.clamp.default, up, -2.0, 2.0)
    act = s.call("act", aten.mul.Tensor, s.call("silu", aten.silu.default, low), both)
    results = [s.cast("act", act, dtype) for _ in range(users)]
    return (gm := s.finish(*results)), {node.name: node for node in gm.graph.nodes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_before_and_after(dtype: torch.dtype) -> None:
    gm, _ = gated(dtype)
    values = [torch.linspace(-4, 4, 15).view(3, 5), torch.linspace(4, -4, 15).view(3, 5)]
    before = gm(*values)[0]
    assert fuse_swiglu(gm, context()).modified
    gm.graph.eliminate_dead_code()
    gm.recompile()
    name = str(dtype).removeprefix("torch.")
    FileCheck().run(
        f"""
        # CHECK: %up
        # CHECK-NEXT: %swiglu : {name}[T, 5] = dsv4.swiglu(%gate, %up, 2.0, {name})
        # CHECK-NEXT: return [%swiglu]
        """,
        format_graph(gm),
    )
    assert torch.equal(gm(*values)[0], before)
    assert not fuse_swiglu(gm, context()).modified


def test_a_result_with_two_roundings_keeps_them() -> None:
    gm, _ = gated(torch.bfloat16, users=2)
    assert fuse_swiglu(gm, context()).modified
    gm.graph.eliminate_dead_code()
    FileCheck().run(
        """
        # CHECK: %swiglu : float32[T, 5] = dsv4.swiglu(%gate, %up, 2.0, float32)
        # CHECK-NEXT: %act_bf16 : bfloat16[T, 5] = aten._to_copy(%swiglu, dtype=bfloat16)
        """,
        format_graph(gm),
    )


def other_limit(n: dict[str, Node]) -> None:
    n["both"].args = (n["up"], -3.0, 3.0)


def one_sided(n: dict[str, Node]) -> None:
    n["both"].args = (n["up"], -2.0)


def lopsided(n: dict[str, Node]) -> None:
    n["both"].args = (n["up"], -1.0, 2.0)


def unclamped_gate(n: dict[str, Node]) -> None:
    n["silu"].args = (n["gate"],)


def unclamped_up(n: dict[str, Node]) -> None:
    n["act"].args = (n["silu"], n["up"])


def two_sided_gate(n: dict[str, Node]) -> None:
    n["silu"].args = (n["both"],)


@pytest.mark.parametrize("alter", [other_limit, one_sided, lopsided, unclamped_gate, unclamped_up, two_sided_gate])
def test_near_misses_stay(alter: Callable[[dict[str, Node]], None]) -> None:
    gm, nodes = gated(torch.float32)
    alter(nodes)
    text = format_graph(gm)
    assert not fuse_swiglu(gm, context()).modified
    assert format_graph(gm) == text


@pytest.mark.parametrize(("numerics", "dtype"), [("exact", "float32"), ("reference", "bfloat16")])
def test_on_the_model(numerics: str, dtype: str) -> None:
    stage = walk("narrow", numerics, "fp8_fp4").stages["fuse_swiglu"]  # type: ignore[arg-type]
    FileCheck().check_not("aten.silu").run(stage.after)
    call = f"%l2_swiglu : {dtype}[T, 64] = dsv4.swiglu(%l2_shared_gate, %l2_shared_up, 10.0, {dtype})"
    FileCheck().check(call).run(stage.after)
    assert max_difference(stage.logits_before, stage.logits_after) <= 1e-5
