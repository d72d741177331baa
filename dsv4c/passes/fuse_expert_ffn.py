"""The routed experts, a batched gather in aten, become one operator.

sum_k bmm(w2[ids], weights * silu(clamp_max(gate)) * clamp(up)), gate, up = split(bmm(w13[ids], x))
    -> dsv4.moe_ffn(x, ids, weights, w13, None, w2, None, 0, 0, limit, 0)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.graph.annotations import get_flags, get_layer, value_of
from dsv4c.graph.emit import Emitter
from dsv4c.passes.operands import CASTS, RESHAPES, is_call, skip, skip_widening
from dsv4c.passes.pass_manager import PassContext

aten, dsv4 = torch.ops.aten, torch.ops.dsv4


@dataclass(frozen=True)
class _Match:
    x: Node
    ids: Node
    weights: Node
    w13: Node
    w2: Node
    limit: float


def fuse_expert_ffn(gm: GraphModule, ctx: PassContext) -> PassResult:
    modified = False
    for node in list(gm.graph.nodes):
        match = _match(node)
        if match is None:
            continue
        with gm.graph.inserting_before(node):
            emit = Emitter(gm.graph, get_layer(node), get_flags(node))
            operands = (match.x, match.ids, match.weights, match.w13, None, match.w2, None)
            fused = emit.call("moe_ffn", dsv4.moe_ffn.default, *operands, 0, 0, match.limit, 0)
        node.replace_all_uses_with(fused)
        modified = True
    return PassResult(gm, modified)


def _match(total: Node) -> _Match | None:
    """The operands where `total` is the weighted sum over the chosen experts."""
    axes: Any = total.args[1:]
    if not is_call(total, aten.sum.dim_IntList) or len(axes) != 1 or list(axes[0]) != [1]:
        return None
    down = _behind(total.args[0])
    if not is_call(down, aten.bmm.default):
        return None
    w2, ids = _gathered(down.args[0])
    # Between the activation and the second projection: a rounding to the activation dtype, and its widening.
    rounded = skip_widening(_behind(down.args[1]))
    weighted = skip(rounded, CASTS)
    if not is_call(weighted, aten.mul.Tensor) or w2 is None:
        return None
    act, weights = weighted.args[0], _behind(weighted.args[1])
    gated = _swiglu(act)
    if gated is None:
        return None
    gate_up, limit = gated
    up_proj = _behind(gate_up)
    if not is_call(up_proj, aten.bmm.default):
        return None
    w13, first_ids = _gathered(up_proj.args[0])
    x = skip_widening(_behind(up_proj.args[1]))
    if w13 is None or ids is None or first_ids is not ids or value_of(x).dim() != 2:
        return None
    # The operator rounds the activation to the dtype of x.
    if value_of(rounded).dtype != value_of(x).dtype:
        return None
    return _Match(x, ids, weights, w13, w2, limit)


def _behind(node: Any) -> Node:
    assert isinstance(node, Node)
    return skip(node, RESHAPES)


def _gathered(node: Any) -> tuple[Node | None, Node | None]:
    """(table, ids) of table[ids], through reshapes."""
    gather: Any = _behind(node)
    if not is_call(gather, aten.index.Tensor) or len(gather.args[1]) != 1:
        return None, None
    table, (ids,) = gather.args
    return table, ids


def _swiglu(act: Any) -> tuple[Node, float] | None:
    """(gate_up, limit) of silu(clamp_max(gate, limit)) * clamp(up, -limit, limit) over the halves of gate_up."""
    if not is_call(act, aten.mul.Tensor):
        return None
    silu, up = act.args
    if not is_call(silu, aten.silu.default) or not is_call(up, aten.clamp.default):
        return None
    gate = silu.args[0]
    if not is_call(gate, aten.clamp_max.default):
        return None
    limit = gate.args[1]
    if tuple(up.args[1:]) != (-limit, limit):
        return None
    first, second = gate.args[0], up.args[0]
    if not is_call(first, aten.slice.Tensor) or not is_call(second, aten.slice.Tensor):
        return None
    source, axis, start, middle = first.args
    end = value_of(source).shape[axis]
    halves = start == 0 and second.args == (source, axis, middle, end) and 2 * middle == end
    return (source, limit) if halves else None
