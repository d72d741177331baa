"""The norm behind a mixer joins it on CUDA targets; not one bit of the logits changes."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.testing import FileCheck

from dsv4c.graph.annotations import Numerics, set_flags
from dsv4c.graph.printer import format_graph
from dsv4c.passes.fuse_mhc_norm import fuse_mhc_norm
from dsv4c.passes.insert_fp8_kv import insert_fp8_kv
from dsv4c.passes.pass_manager import run_passes
from dsv4c.step_abi import LaunchFlag
from tests.graph.small_models import checkpoint, context, graph, schedule_logits, until


def mixed(numerics: Numerics = "exact") -> GraphModule:
    return until(graph("one_window", numerics), insert_fp8_kv, numerics)


@pytest.mark.parametrize(("numerics", "dtype"), [("exact", "float32"), ("reference", "bfloat16")])
def test_before_and_after(numerics: Numerics, dtype: str) -> None:
    gm, opened = mixed(numerics), checkpoint("one_window")
    before = schedule_logits(gm, opened)
    gm = run_passes(gm, [fuse_mhc_norm], context(numerics, target="h100"))
    text = format_graph(gm)
    FileCheck().run(
        f"""
        # CHECK: %l0_mhc_mix_norm : ({dtype}[T, 96], float32[T, 2], float32[T, 2, 2]) = dsv4.mhc_mix_norm(%streams, %p_layers_0_hc_attn_fn
        # CHECK-SAME: %p_layers_0_attn_norm
        # CHECK-SAME: 3, 1e-06, 1e-06, 1e-06)
        # CHECK-NEXT: %l0_mhc_normed : {dtype}[T, 96] = getitem(%l0_mhc_mix_norm, 0)
        # CHECK-NEXT: %l0_mhc_comb : float32[T, 2, 2] = getitem(%l0_mhc_mix_norm, 2)
        # CHECK-NEXT: %l0_mhc_post : float32[T, 2] = getitem(%l0_mhc_mix_norm, 1)
        # CHECK: %l0_mhc_mix_norm_1
        # CHECK-SAME: dsv4.mhc_mix_norm(%l0_mhc_combine,
        """,  # noqa: E501
        text,
    )
    # The head collapses without a mixer, and its norm stays.
    assert "dsv4.mhc_mix(" not in text and "%head_norm : " in text
    assert all(torch.equal(a, b) for a, b in zip(before, schedule_logits(gm, opened), strict=True))
    assert not fuse_mhc_norm(gm, context(numerics, target="h100")).modified


def other_user(n: dict[str, Node]) -> None:
    n["l0_mhc_combine"].args = (n["l0_mhc_in"], *n["l0_mhc_combine"].args[1:])


def no_weight(n: dict[str, Node]) -> None:
    n["l0_attn_norm"].args = (n["l0_mhc_in"], None, 1e-6)


def computed_weight(n: dict[str, Node]) -> None:
    n["l0_attn_norm"].args = (n["l0_mhc_in"], n["embedded"], 1e-6)


def other_condition(n: dict[str, Node]) -> None:
    set_flags(n["l0_attn_norm"], LaunchFlag.HEAD)


@pytest.mark.parametrize("alter", [other_user, no_weight, computed_weight, other_condition])
def test_near_misses_stay(alter: Callable[[dict[str, Node]], None]) -> None:
    gm = mixed()
    alter({node.name: node for node in gm.graph.nodes})
    assert fuse_mhc_norm(gm, context(target="h100")).modified  # the second mixer
    gm.graph.eliminate_dead_code()
    text = format_graph(gm)
    FileCheck().check("%l0_mhc_mix : ").check("dsv4.mhc_mix(%streams,").check("dsv4.mhc_mix_norm(").run(text)
    assert not fuse_mhc_norm(gm, context(target="h100")).modified
    assert format_graph(gm) == text


def test_other_targets_keep_the_operators() -> None:
    assert not fuse_mhc_norm(mixed(), context()).modified
