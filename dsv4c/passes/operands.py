"""Reading a graph backwards: what a node is made of, whatever views and casts lie between."""

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from dsv4c.graph.annotations import value_of

aten = torch.ops.aten

CASTS = (aten._to_copy.default,)
RESHAPES = (aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim)


def is_call(node: Any, *targets: Any) -> bool:
    """Whether `node` calls one of the operators."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def skip(node: Node, targets: Collection[Any]) -> Node:
    """The first node behind a chain of one-input calls of `targets`."""
    while is_call(node, *targets):
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def skip_widening(node: Node) -> Node:
    """Behind a cast to float32: kernels widen their inputs themselves."""
    if is_call(node, *CASTS) and value_of(node).dtype == torch.float32:
        source = node.args[0]
        assert isinstance(source, Node)
        return source
    return node


def rounded_result(node: Node) -> Node:
    """The cast that is the only user of `node`, else `node`: where a kernel may round its result itself."""
    users = list(node.users)
    return users[0] if len(users) == 1 and is_call(users[0], *CASTS) else node
