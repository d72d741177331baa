"""The mHC chains become three operators; a chain that is not the model's own is refused."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import Node
from torch.testing import FileCheck

from dsv4c.errors import PassError
from dsv4c.graph.printer import format_graph
from dsv4c.passes.fuse_mhc import fuse_mhc
from tests.graph.small_models import context, graph, max_difference, until, walk

aten = torch.ops.aten


@pytest.mark.parametrize(("name", "numerics"), [("narrow", "exact"), ("narrow", "reference")])
def test_before_and_after(name: str, numerics: str) -> None:
    stage = walk(name, numerics, "fp8_fp4").stages["fuse_mhc"]  # type: ignore[arg-type]
    dtype = "float32" if numerics == "exact" else "bfloat16"
    FileCheck().check("%l1_hc_attn_comb_soft").check("aten.bmm(%l1_hc_attn_comb_t,").run(stage.before)
    FileCheck().check_not("_hc_attn_").check_not("hc_ffn_comb").run(
        "\n".join(line for line in stage.after.splitlines() if " = weight " not in line and "mhc_" not in line)
    )
    FileCheck().run(
        f"""
        # CHECK: %l1_mhc_mix : ({dtype}[T, 96], float32[T, 2], float32[T, 2, 2]) = dsv4.mhc_mix(%l0_mhc_combine_1, %p_layers_1_hc_attn_fn, %p_layers_1_hc_attn_scale, %p_layers_1_hc_attn_base, 3, 1e-06, 1e-06)
        # CHECK-NEXT: %l1_mhc_comb : float32[T, 2, 2] = getitem(%l1_mhc_mix, 2)
        # CHECK-NEXT: %l1_mhc_post : float32[T, 2] = getitem(%l1_mhc_mix, 1)
        # CHECK-NEXT: %l1_mhc_in : {dtype}[T, 96] = getitem(%l1_mhc_mix, 0)
        # CHECK: %l1_mhc_combine : {dtype}[T, 2, 96] = dsv4.mhc_combine(%l1_o_b
        # CHECK-SAME: %l0_mhc_combine_1, %l1_mhc_post, %l1_mhc_comb)
        # CHECK: %mhc_head : {dtype}[R, 96] = dsv4.mhc_head(%head_streams, %p_hc_head_fn, %p_hc_head_scale, %p_hc_head_base, 1e-06, 1e-06)
        """,  # noqa: E501
        stage.after,
    )
    assert max_difference(stage.logits_before, stage.logits_after) <= 1e-5


def other_eps(nodes: dict[str, Node]) -> None:
    node = nodes["l0_hc_attn_pre"]
    node.args = (node.args[0], 1e-3)


def rows_first(nodes: dict[str, Node]) -> None:
    node = nodes["l0_hc_attn_comb_sum"]
    node.args = (node.args[0], [2], True)


def not_transposed(nodes: dict[str, Node]) -> None:
    node = nodes["l0_hc_ffn_mixed"]
    node.args = (nodes["l0_hc_ffn_comb_4"], node.args[1])


def other_streams_collapsed(nodes: dict[str, Node]) -> None:
    node = nodes["l0_hc_ffn_weighted"]
    node.args = (node.args[0], nodes["streams"])


def head_without_sigmoid(nodes: dict[str, Node]) -> None:
    nodes["hc_head_pre"].replace_input_with(nodes["hc_head_sig"], nodes["hc_head_affine"])


@pytest.mark.parametrize(
    ("alter", "found"),
    [
        (other_eps, "(1, 2, 1)"),
        (rows_first, "(1, 2, 1)"),
        (not_transposed, "(2, 1, 1)"),
        (other_streams_collapsed, "(1, 2, 1)"),
        (head_without_sigmoid, "(2, 2, 0)"),
    ],
)
def test_near_misses_are_refused(alter: Callable[[dict[str, Node]], None], found: str) -> None:
    gm = graph("one_window")
    alter({node.name: node for node in gm.graph.nodes})
    with pytest.raises(PassError) as error:
        fuse_mhc(gm, context())
    assert error.value.message == f"fuse_mhc found {found} mixers, combines and heads; 1 layers have (2, 2, 1)"


def test_twice_is_refused() -> None:
    gm = until(graph("one_window"), fuse_mhc)
    text = format_graph(gm)
    with pytest.raises(PassError, match=r"found \(0, 0, 0\)"):
        fuse_mhc(gm, context())
    assert format_graph(gm) == text
