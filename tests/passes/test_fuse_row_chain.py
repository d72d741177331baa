"""Operators on rows in a row become one on CUDA targets; not one bit of the results changes."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.testing import FileCheck

from dsv4c.graph.annotations import set_flags
from dsv4c.graph.printer import format_graph
from dsv4c.passes.fuse_row_chain import fuse_row_chain
from dsv4c.passes.insert_fp8_kv import insert_fp8_kv
from dsv4c.passes.pass_manager import run_passes
from dsv4c.step_abi import Input, LaunchFlag
from tests.graph.scratch import Scratch
from tests.graph.small_models import checkpoint, context, graph, schedule_logits, until

aten, dsv4 = torch.ops.aten, torch.ops.dsv4


def chained(*steps: str, dtype: torch.dtype = torch.bfloat16, users: int = 1) -> tuple[GraphModule, dict[str, Node]]:
    """The steps one after another on x [T, 2, 64]; the last result is returned `users` times."""
    s = Scratch()
    x = s.rows("x", 2, 64, dtype=dtype)
    positions = s.placeholder("positions", Input.POSITIONS, ("T",), torch.int32)
    weight, freqs = s.weight("weight", 64), s.weight("freqs", 8)
    calls = {
        "norm": (dsv4.rms_norm.default, weight, 1e-6),
        "rope": (dsv4.rope.default, positions, freqs, False),
        "hadamard": (dsv4.hadamard.default,),
        "fp8": (dsv4.fp8_round.default, 32, 48),
        "fp4": (dsv4.fp4_round.default, 32),
    }
    for step in steps:
        target, *operands = calls[step]
        x = s.call(step, target, x, *operands)
    gm = s.finish(*[x] * users)
    return gm, {node.name: node for node in gm.graph.nodes}


def values(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 2, 64, generator=generator).to(dtype)
    weight = torch.rand(64, generator=generator) + 0.5
    return x, torch.tensor([0, 7, 900], dtype=torch.int32), weight, 0.1 ** torch.arange(8)


def fused(gm: GraphModule) -> str:
    assert fuse_row_chain(gm, context(target="h100")).modified
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return format_graph(gm)


@pytest.mark.parametrize(
    ("steps", "operands"),
    [
        (("norm", "rope"), "%weight, %positions, %freqs, True, 1e-06, False, False, 0, 0, 0"),
        (("norm", "fp8"), "%weight, None, None, True, 1e-06, False, False, 1, 32, 48"),
        (("rope", "hadamard", "fp4"), "None, %positions, %freqs, False, 0.0, False, True, 2, 32, 0"),
        (("norm", "rope", "hadamard", "fp8"), "%weight, %positions, %freqs, True, 1e-06, False, True, 1, 32, 48"),
        (("hadamard", "fp8"), "None, None, None, False, 0.0, False, True, 1, 32, 48"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_before_and_after(steps: tuple[str, ...], operands: str, dtype: torch.dtype) -> None:
    gm, _ = chained(*steps, dtype=dtype)
    before = gm(*values(dtype))[0]
    text = fused(gm)
    name = str(dtype).removeprefix("torch.")
    FileCheck().check(f"%{steps[0]}_chain : {name}[T, 2, 64] = dsv4.row_chain(%x, {operands})").run(text)
    assert text.count("dsv4.") == 1
    assert torch.equal(gm(*values(dtype))[0], before)
    assert not fuse_row_chain(gm, context(target="h100")).modified


@pytest.mark.parametrize(
    ("steps", "calls"),
    [
        # The second half of a sequence that falls back in the order is a chain of its own.
        (("norm", "rope", "norm", "fp8"), ["norm_chain", "norm_1_chain"]),
        (("norm", "rope", "fp8", "fp4"), ["norm_chain", "fp4"]),
        (("hadamard", "norm", "fp4"), ["hadamard", "norm_chain"]),
    ],
)
def test_the_order_is_part_of_the_pattern(steps: tuple[str, ...], calls: list[str]) -> None:
    gm, _ = chained(*steps)
    before = gm(*values())[0]
    text = fused(gm)
    assert [line.split(" ")[0].removeprefix("%") for line in text.splitlines() if " = dsv4." in line] == calls
    assert torch.equal(gm(*values())[0], before)


def test_the_last_one_may_have_more_users() -> None:
    gm, _ = chained("rope", "fp8", users=2)
    FileCheck().check("return [%rope_chain, %rope_chain]").run(fused(gm))


def alone(n: dict[str, Node]) -> None:
    n["fp8"].args = (n["x"], 32, 48)


def other_user(n: dict[str, Node]) -> None:
    output = next(node for node in n["fp8"].users)
    output.args = ((n["rope"], n["fp8"]),)


def view_between(n: dict[str, Node]) -> None:
    graph = n["fp8"].graph
    with graph.inserting_before(n["fp8"]):
        view = graph.call_function(aten.reshape.default, (n["rope"], [-1, 128]))
    view.meta["val"] = n["rope"].meta["val"].reshape(-1, 128)
    n["fp8"].args = (view, 32, 48)


def as_another_operand(n: dict[str, Node]) -> None:
    n["fp8"].target, n["fp8"].args = dsv4.rms_norm.default, (n["x"], n["rope"], 1e-6)


def other_condition(n: dict[str, Node]) -> None:
    set_flags(n["fp8"], LaunchFlag.HEAD)


def backwards(n: dict[str, Node]) -> None:
    n["fp8"].target, n["fp8"].args = dsv4.rms_norm.default, (n["rope"], None, 1e-6)


@pytest.mark.parametrize("alter", [alone, other_user, view_between, as_another_operand, other_condition, backwards])
def test_near_misses_stay(alter: Callable[[dict[str, Node]], None]) -> None:
    gm, nodes = chained("rope", "fp8")
    alter(nodes)
    text = format_graph(gm)
    assert not fuse_row_chain(gm, context(target="h100")).modified
    assert format_graph(gm) == text


def test_other_targets_keep_the_operators() -> None:
    gm, _ = chained("rope", "fp8")
    assert not fuse_row_chain(gm, context()).modified


@pytest.mark.parametrize("name", ["one_layer", "partial_blocks"])
def test_on_the_model(name: str) -> None:
    opened = checkpoint(name)
    ctx = context("reference", target="h100")
    gm = until(graph(name, "reference"), insert_fp8_kv, "reference")
    before = schedule_logits(gm, opened)
    gm = run_passes(gm, [fuse_row_chain], ctx)
    text = format_graph(gm)
    eps = opened.config.rms_norm_eps
    FileCheck().run(
        f"""
        # CHECK: %l0_q_latent_chain : bfloat16[T, {opened.config.q_lora_rank}] = dsv4.row_chain(%l0_part
        # CHECK-SAME: None, None, True, {eps}, False, False, 1, 128, {opened.config.q_lora_rank})
        # CHECK: %l0_q_normed_chain : bfloat16[T,
        # CHECK-SAME: dsv4.row_chain(%l0_q_heads, None, %positions, %
        # CHECK-SAME: True, {eps}, False, False, 0, 0, 0)
        # CHECK: %l0_kv_normed_chain
        # CHECK-SAME: True, {eps}, False, False, 1, 64,
        """,
        text,
    )
    # What remains alone: the norm with two users, the roundings without a norm, the rotation back.
    assert "%l0_unrotated : " in text and "dsv4.hadamard" not in text
    assert all(torch.equal(a, b) for a, b in zip(before, schedule_logits(gm, opened), strict=True))
