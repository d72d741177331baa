"""Projections of one input become one matrix product.

    a = dsv4.linear(x, wa, ...); b = dsv4.linear(x, wb, ...)
        -> ab = dsv4.linear(x, cat(wa, wb), ...); a = ab[:, :A]; b = ab[:, A:]

Only where input, storage (and how the build makes it) and result dtype agree. Scales of the merged matrix cover fewer
rows where a source does not end on a block border, so that no block straddles two sources; the codes stay as they are.
"""

import math
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.graph.annotations import Parameter, get_flags, get_layer, get_parameter, value_of
from dsv4c.graph.emit import Emitter
from dsv4c.graph.parameters import unstraddled_block
from dsv4c.passes.pass_manager import PassContext
from dsv4c.passes.storage import store_parameter

aten, dsv4 = torch.ops.aten, torch.ops.dsv4


def merge_projections(gm: GraphModule, ctx: PassContext) -> PassResult:
    groups: dict[object, list[Node]] = {}
    for node in gm.graph.nodes:
        if node.target is dsv4.linear.default:
            groups.setdefault(_key(node), []).append(node)
    mergeable = [nodes for nodes in groups.values() if len(nodes) > 1]
    for nodes in mergeable:
        _merge(gm, nodes)
    return PassResult(gm, bool(mergeable))


def _weight(node: Node) -> Parameter:
    weight = node.args[1]
    assert isinstance(weight, Node)
    what = get_parameter(weight)
    assert what is not None, node
    return what


def _key(node: Node) -> object:
    x, codes, scales, _, _, dtype = node.args
    assert isinstance(codes, Node)
    scale_dtype = value_of(scales).dtype if isinstance(scales, Node) else None
    # Blocks may differ in rows, which merging adapts, but not in columns.
    return x, value_of(codes).dtype, scale_dtype, node.args[4], _weight(node).quantization, dtype, get_flags(node)


def _merge(gm: GraphModule, nodes: list[Node]) -> None:
    parameters = [_weight(node) for node in nodes]
    outputs = [int(value_of(node).shape[1]) for node in nodes]
    x, codes, *_, dtype = nodes[0].args
    assert isinstance(x, Node) and isinstance(codes, Node)
    rows = tuple(count for what in parameters for count in what.rows)
    blocks = [what.block for what in parameters if what.block is not None]
    block = unstraddled_block((math.gcd(*(b[0] for b in blocks)), blocks[0][1]), rows) if blocks else None
    merged = replace(parameters[0], sources=tuple(s for p in parameters for s in p.sources), rows=rows, block=block)
    layer = get_layer(nodes[0])
    name = codes.name.removesuffix("_codes").removesuffix("_stored") + f"_and_{len(nodes) - 1}_more"
    columns = int(value_of(x).shape[1])
    storage = store_parameter(gm, codes, name, merged, [sum(outputs), columns])
    with gm.graph.inserting_before(nodes[0]):
        emit = Emitter(gm.graph, layer, get_flags(nodes[0]))
        product = emit.call("merged", dsv4.linear.default, x, *storage, dtype)
        start = 0
        for node, width in zip(nodes, outputs, strict=True):
            part = emit.call("part", aten.slice.Tensor, product, 1, start, start + width)
            node.replace_all_uses_with(part)
            start += width
