"""What is left of aten becomes operators that have kernels; casts around them become the kernels' own rounding.

    cast(aten.linear(cast(x), w))             -> dsv4.linear(x, w, None, 0, 0, dtype)
    cast(aten.rms_norm(cast(x), [W], w, eps)) -> dsv4.rms_norm(x, w, eps)
    cast(aten.embedding(table, ids))          -> dsv4.embedding(ids, table, dtype)
    cast(aten.add(cast(a), cast(b)))          -> dsv4.add(a, b, dtype)
    aten.index_select(x, 0, rows)             -> dsv4.gather_rows(x, rows)

Views (reshape, slice, unsqueeze, expand) stay: the plan turns them into strides.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.graph.annotations import value_of
from dsv4c.graph.emit import shared_fake_result
from dsv4c.passes.operands import rounded_result, skip_widening
from dsv4c.passes.pass_manager import PassContext

aten, dsv4 = torch.ops.aten, torch.ops.dsv4

# (operator, arguments) for a node whose result is to have the given dtype; None for a form that no operator has, which
# stays for the plan to refuse.
Call = tuple[Any, tuple[Any, ...]] | None


def _linear(node: Node, dtype: torch.dtype) -> Call:
    if len(node.args) != 2:  # a bias
        return None
    x, weight = node.args
    return dsv4.linear.default, (_unwidened(x), weight, None, 0, 0, dtype)


def _rms_norm(node: Node, dtype: torch.dtype) -> Call:
    x, axes, weight, eps = node.args
    if len(axes) != 1:  # type: ignore[arg-type]
        return None
    source = _unwidened(x)
    # The operator rounds to the dtype of its input.
    return dsv4.rms_norm.default, (source if value_of(source).dtype == dtype else x, weight, eps)


def _embedding(node: Node, dtype: torch.dtype) -> Call:
    table, ids = node.args[:2]
    return dsv4.embedding.default, (ids, table, dtype)


def _add(node: Node, dtype: torch.dtype) -> Call:
    a, b = node.args
    if node.kwargs or not isinstance(b, Node) or value_of(_unwidened(a)).shape != value_of(b).shape:
        return None
    return dsv4.add.default, (_unwidened(a), _unwidened(b), dtype)


def _gather_rows(node: Node, dtype: torch.dtype) -> Call:
    x, axis, rows = node.args
    if axis != 0:
        return None
    return dsv4.gather_rows.default, (x, rows)


_LOWERINGS: dict[Any, Callable[[Node, torch.dtype], Call]] = {
    aten.linear.default: _linear,
    aten.rms_norm.default: _rms_norm,
    aten.embedding.default: _embedding,
    aten.add.Tensor: _add,
    aten.index_select.default: _gather_rows,
}


def lower_aten(gm: GraphModule, ctx: PassContext) -> PassResult:
    modified = False
    for node in list(gm.graph.nodes):
        lower = _LOWERINGS.get(node.target)
        if lower is None:
            continue
        result = rounded_result(node)
        call = lower(node, value_of(result).dtype)
        if call is None:
            continue
        # In place, so that the node keeps its name.
        target, args = call
        node.target, node.args, node.kwargs = target, args, {}
        node.meta["val"] = shared_fake_result(target, args, {})
        if result is not node:
            result.replace_all_uses_with(node)
        modified = True
    return PassResult(gm, modified)


def _unwidened(x: Any) -> Node:
    assert isinstance(x, Node)
    return skip_widening(x)
