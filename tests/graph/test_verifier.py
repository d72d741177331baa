"""Every invariant, violated once: the error names the node."""

import operator
import re
from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from dsv4c.graph.annotations import set_flags
from dsv4c.graph.verifier import verify_graph
from dsv4c.step_abi import LaunchFlag
from tests.graph.small_models import graph

aten = torch.ops.aten


def wrong_shape(nodes: dict[str, Node]) -> None:
    nodes["l0_q_latent"].meta["val"] = nodes["l0_q_a"].meta["val"].new_empty((3, 48))


def wrong_dtype(nodes: dict[str, Node]) -> None:
    nodes["l0_kv"].meta["val"] = nodes["l0_kv"].meta["val"].to(torch.bfloat16)


def no_value(nodes: dict[str, Node]) -> None:
    del nodes["l0_kv"].meta["val"]


def foreign_operator(nodes: dict[str, Node]) -> None:
    nodes["l0_ffn_sum"].target = operator.add


def unknown_placeholder(nodes: dict[str, Node]) -> None:
    del nodes["p_layers_0_attn_norm"].meta["dsv4_placeholder"]


def conditional_source(nodes: dict[str, Node]) -> None:
    set_flags(nodes["l0_attn_norm"], LaunchFlag.HEAD)


def sampling_feeds_logits(nodes: dict[str, Node]) -> None:
    set_flags(nodes["head_norm"], LaunchFlag.HEAD | LaunchFlag.SAMPLE)


def early_commit(nodes: dict[str, Node]) -> None:
    nodes["l0_attention"].prepend(nodes["l0_commit"])


def late_entries(nodes: dict[str, Node]) -> None:
    nodes["l0_attention"].append(nodes["l0_compress_update"])


def late_index_keys(nodes: dict[str, Node]) -> None:
    nodes["l0_selected"].append(nodes["l0_index_update"])


def used_before_made(nodes: dict[str, Node]) -> None:
    nodes["l0_q_a"].prepend(nodes["l0_q_latent"])


Violation = Callable[[dict[str, Node]], None]
VIOLATIONS: list[tuple[Violation, str]] = [
    (wrong_shape, r"%l0_q_latent \(aten.rms_norm\) is annotated float32\[3, 48\], its operator gives"),
    (wrong_dtype, r"%l0_kv \(dsv4.rope\) is annotated bfloat16"),
    (no_value, r"%l0_kv \(dsv4.rope\) is annotated \(\)"),
    (foreign_operator, r"%l0_ffn_sum calls .*neither aten nor dsv4"),
    (unknown_placeholder, "%p_layers_0_attn_norm is not annotated"),
    (conditional_source, r"%l0_q_a always needs %l0_attn_norm, which runs only for"),
    (sampling_feeds_logits, r"%logits always needs %head_norm, which runs only for .*SAMPLE"),
    (early_commit, "%s_l0_ring is overwritten before the attention has read it"),
    (late_entries, "%s_l0_entries is read before this step's entries are written"),
    (late_index_keys, "%s_l0_index_keys is read before this step's entries are written"),
    (used_before_made, "l0_q_a"),
]


def test_the_builder_keeps_them_all() -> None:
    for numerics in ("exact", "reference"):
        verify_graph(graph("one_layer", numerics))  # type: ignore[arg-type]


@pytest.mark.parametrize(("violate", "message"), VIOLATIONS, ids=[violate.__name__ for violate, _ in VIOLATIONS])
def test_a_violation_is_named(violate: Violation, message: str) -> None:
    gm = graph("one_layer")
    violate({node.name: node for node in gm.graph.nodes})
    with pytest.raises((AssertionError, RuntimeError)) as error:
        verify_graph(gm)
    assert re.search(message, str(error.value)), str(error.value)
