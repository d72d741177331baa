"""The gate of the shared expert becomes one operator.

round(silu(clamp_max(gate, limit)) * clamp(up, -limit, limit)) -> dsv4.swiglu(gate, up, limit, dtype)
"""

import torch
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.graph.annotations import get_flags, get_layer, value_of
from dsv4c.graph.emit import Emitter
from dsv4c.passes.operands import is_call, rounded_result
from dsv4c.passes.pass_manager import PassContext

aten, dsv4 = torch.ops.aten, torch.ops.dsv4


def fuse_swiglu(gm: GraphModule, ctx: PassContext) -> PassResult:
    modified = False
    for node in list(gm.graph.nodes):
        if not is_call(node, aten.mul.Tensor):
            continue
        silu, clamped = node.args
        if not is_call(silu, aten.silu.default) or not is_call(clamped, aten.clamp.default):
            continue
        up, *bounds = clamped.args
        if not is_call(silu.args[0], aten.clamp_max.default):
            continue
        gate, limit = silu.args[0].args
        if bounds != [-limit, limit]:
            continue
        result = rounded_result(node)
        with gm.graph.inserting_before(result):
            emit = Emitter(gm.graph, get_layer(node), get_flags(node))
            fused = emit.call("swiglu", dsv4.swiglu.default, gate, up, limit, value_of(result).dtype)
        result.replace_all_uses_with(fused)
        modified = True
    return PassResult(gm, modified)
