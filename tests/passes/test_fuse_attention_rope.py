"""The rotation back joins the attention on CUDA targets; not one bit of the logits changes."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.testing import FileCheck

from dsv4c.graph.annotations import Numerics, set_flags
from dsv4c.graph.printer import format_graph
from dsv4c.graph.verifier import verify_graph
from dsv4c.passes.fuse_attention_rope import fuse_attention_rope
from dsv4c.passes.insert_fp8_kv import insert_fp8_kv
from dsv4c.passes.pass_manager import run_passes
from dsv4c.step_abi import LaunchFlag
from tests.graph.small_models import checkpoint, context, graph, schedule_logits, until


def attended(name: str = "one_window", numerics: Numerics = "exact") -> GraphModule:
    return until(graph(name, numerics), insert_fp8_kv, numerics)


@pytest.mark.parametrize(("name", "numerics"), [("one_layer", "exact"), ("one_layer", "reference")])
def test_before_and_after(name: str, numerics: Numerics) -> None:
    gm, opened = attended(name, numerics), checkpoint(name)
    before = schedule_logits(gm, opened)
    gm = run_passes(gm, [fuse_attention_rope], context(numerics, target="h100"))
    text = format_graph(gm)
    # The commit stays behind the attention.
    FileCheck().run(
        """
        # CHECK: %l0_selected
        # CHECK-NEXT: %l0_attention_unrotated
        # CHECK-SAME: = dsv4.attention_unrotated(%l0_q,
        # CHECK-SAME: %l0_selected, %p_layers_0_attn_attn_sink
        # CHECK-SAME: , %slots, %positions, %block_table, 20, 4, 8,
        # CHECK-NEXT: %l0_commit
        # CHECK-NEXT: %l0_o_heads
        # CHECK-SAME: aten.reshape(%l0_attention_unrotated,
        """,
        text,
    )
    assert "dsv4.attention(" not in text and "%l0_unrotated" not in text
    assert all(torch.equal(a, b) for a, b in zip(before, schedule_logits(gm, opened), strict=True))
    assert not fuse_attention_rope(gm, context(numerics, target="h100")).modified


def forwards(n: dict[str, Node]) -> None:
    n["l0_unrotated"].args = (*n["l0_unrotated"].args[:3], False)


def other_positions(n: dict[str, Node]) -> None:
    n["l0_unrotated"].args = (n["l0_attention"], n["slots"], *n["l0_unrotated"].args[2:])


def other_user(n: dict[str, Node]) -> None:
    n["l0_o_heads"].args = (n["l0_attention"], n["l0_o_heads"].args[1])


def other_condition(n: dict[str, Node]) -> None:
    set_flags(n["l0_unrotated"], LaunchFlag.HEAD)


@pytest.mark.parametrize("alter", [forwards, other_positions, other_user, other_condition])
def test_near_misses_stay(alter: Callable[[dict[str, Node]], None]) -> None:
    gm = attended()
    nodes = {node.name: node for node in gm.graph.nodes}
    alter(nodes)
    text = format_graph(gm)
    assert not fuse_attention_rope(gm, context(target="h100")).modified
    assert format_graph(gm) == text


def test_other_targets_keep_the_operators() -> None:
    assert not fuse_attention_rope(attended(), context()).modified


def test_the_verifier_knows_it_as_a_reader_of_the_state() -> None:
    gm = run_passes(attended(), [fuse_attention_rope], context(target="h100"))
    nodes = {node.name: node for node in gm.graph.nodes}
    nodes["l0_attention_unrotated"].prepend(nodes["l0_commit"])
    with pytest.raises(AssertionError, match="overwritten before the attention has read it"):
        verify_graph(gm)
