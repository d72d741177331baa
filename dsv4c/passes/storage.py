"""Placeholders that passes add: above all the stored form of a weight, its codes and the scales beside them."""

from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from dsv4c.graph.annotations import Constant, Parameter, StatePlane, get_layer, set_layer, set_placeholder, value_of
from dsv4c.graph.parameters import PACKED, part_dtype
from dsv4c.step_abi import StateKind

Storage = tuple[Node, Node | None, int, int]  # codes, scales, block rows, block columns


def placeholder_after(
    gm: GraphModule, anchor: Node, name: str, what: Parameter | Constant | StatePlane, shape: list[int]
) -> Node:
    """A placeholder of the layer of `anchor`, a placeholder of the same graph. A constant of no layer is of none.

    Of state planes this makes counts, int64.
    """
    with gm.graph.inserting_after(anchor):
        node = gm.graph.placeholder(name)
    dtype = _dtype(what)
    with value_of(anchor).fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = torch.empty(shape, dtype=dtype)
    set_placeholder(node, what)
    set_layer(node, what.layer if isinstance(what, Constant) else get_layer(anchor))
    return node


def _dtype(what: Parameter | Constant | StatePlane) -> torch.dtype:
    if isinstance(what, StatePlane):
        assert what.kind is StateKind.ROUTING_COUNTS, what
        return torch.int64
    return what.dtype if isinstance(what, Constant) else part_dtype(what)


def store_parameter(gm: GraphModule, anchor: Node, name: str, what: Parameter, shape: list[int]) -> Storage:
    """Placeholders of the stored form of `what`, whose decoded shape is `shape` [..., rows, columns].

    They are put after `anchor`, a placeholder of the same graph. Scales cover `what.block` each.
    """
    *lead, rows, columns = shape if len(shape) > 1 else [1, *shape]
    if what.block is None:
        return placeholder_after(gm, anchor, name, replace(what, part="codes"), shape), None, 0, 0
    packed = columns // 2 if what.stored_as in PACKED else columns
    codes = placeholder_after(gm, anchor, f"{name}_codes", replace(what, part="codes"), [*lead, rows, packed])
    block_rows, block_columns = what.block
    grid = [*lead, -(-rows // block_rows), -(-columns // block_columns)]
    scales = placeholder_after(gm, codes, f"{name}_scales", replace(what, part="scales"), grid)
    return codes, scales, block_rows, block_columns
