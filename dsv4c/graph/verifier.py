"""Invariants that hold after the builder and after every pass. A violation is a bug in dsv4c, not in the input."""

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsv4c.graph.annotations import Placeholder, StatePlane, get_flags
from dsv4c.graph.emit import shared_fake_result
from dsv4c.graph.printer import format_value, target_name

_NAMESPACES = ("aten", "dsv4")


def verify_graph(gm: GraphModule) -> None:
    """Raise AssertionError, naming the node, where the graph breaks an invariant.

    - FX's own lint; only aten and dsv4 operators; placeholders say what they stand for;
    - `meta["val"]` has the shape and dtype that the operator gives;
    - a node that runs only for logits or sampling feeds no node that always runs;
    - state: `compress` before the reads of its entries, the ring's commit after its attention.
    """
    gm.graph.lint()
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in order:
        if node.op == "placeholder":
            assert isinstance(node.meta.get("dsv4_placeholder"), Placeholder), f"%{node.name} is not annotated"
        elif node.op == "call_function":
            _verify_call(node)
    _verify_state(gm, order)


def _verify_call(node: Node) -> None:
    target = node.target
    known = target is operator.getitem or getattr(target, "namespace", None) in _NAMESPACES
    assert known, f"%{node.name} calls {target}, which is neither aten nor dsv4"
    expected, found = shared_fake_result(target, node.args, node.kwargs), node.meta.get("val")
    assert found is expected or _signature(found) == _signature(expected), (
        f"%{node.name} ({target_name(target)}) is annotated {_signature(found)}, "
        f"its operator gives {_signature(expected)}"
    )
    flags = get_flags(node)
    for used in node.all_input_nodes:
        missing = get_flags(used) & ~flags
        assert not missing, f"%{node.name} always needs %{used.name}, which runs only for {missing!r}"


def _signature(value: Any) -> str:
    return format_value(value, {})


def _verify_state(gm: GraphModule, order: dict[Node, int]) -> None:
    dsv4 = torch.ops.dsv4
    for plane in gm.graph.nodes:
        if plane.op != "placeholder" or not isinstance(plane.meta["dsv4_placeholder"], StatePlane):
            continue
        users = {user.target: order[user] for user in plane.users}
        writes = users.get(dsv4.compress.default)
        # The ring and the entries are read by the attention, index keys by the selection.
        readers = (dsv4.attention.default, dsv4.attention_unrotated.default, dsv4.select_entries.default)
        reads = next((users[reader] for reader in readers if reader in users), None)
        if writes is not None and reads is not None:
            assert writes < reads, f"%{plane.name} is read before this step's entries are written"
        commit = users.get(dsv4.commit_ring.default)
        if commit is not None and reads is not None:
            assert reads < commit, f"%{plane.name} is overwritten before the attention has read it"
