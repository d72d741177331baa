"""The routers become one operator each."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import Node
from torch.testing import FileCheck

from dsv4c.errors import PassError
from dsv4c.passes.fuse_router import fuse_router
from tests.graph.small_models import context, graph, max_difference, until, walk

aten = torch.ops.aten


def test_before_and_after() -> None:
    """`narrow` hashes layer 0 and scores the others."""
    stage = walk("narrow", "exact", "fp8_fp4").stages["fuse_router"]
    FileCheck().check("aten.softplus(%l0_ffn_logits)").check("aten.topk(%l1_ffn_biased, 2)").run(stage.before)
    FileCheck().check_not("aten.softplus").check_not("aten.topk").check_not("aten.gather").run(stage.after)
    FileCheck().run(
        """
        # CHECK: %l0_route : (int32[T, 2], float32[T, 2]) = dsv4.route_hash(%l0_ffn_logits, %p_layers_0_ffn_gate_tid2eid, %token_ids, 1.0)
        # CHECK-NEXT: %l0_route_weights : float32[T, 2] = getitem(%l0_route, 1)
        # CHECK-NEXT: %l0_route_ids : int32[T, 2] = getitem(%l0_route, 0)
        # CHECK: dsv4.moe_ffn(%l0_ffn_norm, %l0_route_ids, %l0_route_weights,
        # CHECK: %l1_route : (int32[T, 2], float32[T, 2]) = dsv4.route_topk(%l1_ffn_logits, %p_layers_1_ffn_gate_bias, 2, 1.0)
        # CHECK: dsv4.moe_ffn(%l1_ffn_norm, %l1_route_ids, %l1_route_weights,
        """,  # noqa: E501
        stage.after,
    )
    assert max_difference(stage.logits_before, stage.logits_after) <= 1e-5


def weights_of_biased_scores(nodes: dict[str, Node]) -> None:
    node = nodes["l0_ffn_chosen"]
    node.args = (nodes["l0_ffn_biased"], *node.args[1:])


def other_count(nodes: dict[str, Node]) -> None:
    node = nodes["l0_ffn_top"]
    node.args = (node.args[0], 3)


def other_epsilon(nodes: dict[str, Node]) -> None:
    node = nodes["l0_ffn_total_eps"]
    node.args = (node.args[0], 1e-6)


def other_scale(nodes: dict[str, Node]) -> None:
    node = nodes["l0_ffn_weights"]
    node.args = (node.args[0], 2.0)


def no_root(nodes: dict[str, Node]) -> None:
    nodes["l0_ffn_scores"].replace_all_uses_with(nodes["l0_ffn_softplus"])


SCORE_MISSES = [weights_of_biased_scores, other_count, other_epsilon, other_scale, no_root]


@pytest.mark.parametrize("alter", SCORE_MISSES)
def test_score_near_misses_are_refused(alter: Callable[[dict[str, Node]], None]) -> None:
    gm = graph("one_layer")
    alter({node.name: node for node in gm.graph.nodes})
    with pytest.raises(PassError, match=r"found \(0, 0\) score and hash routers; the model has \(1, 0\)"):
        fuse_router(gm, context())


def test_a_hash_router_gathers_by_its_own_lookup() -> None:
    gm = graph("one_window")
    nodes = {node.name: node for node in gm.graph.nodes}
    # The weights are those of other experts than the ones that run.
    nodes["l0_ffn_chosen"].args = (nodes["l0_ffn_scores"], 1, nodes["positions"])
    with pytest.raises(PassError, match=r"found \(0, 0\) score and hash routers; the model has \(0, 1\)"):
        fuse_router(gm, context())


@pytest.mark.parametrize("name", ["one_layer", "one_window"])
def test_twice_is_refused(name: str) -> None:
    gm = until(graph(name), fuse_router)
    with pytest.raises(PassError, match=r"found \(0, 0\)"):
        fuse_router(gm, context())
