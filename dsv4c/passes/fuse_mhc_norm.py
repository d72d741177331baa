"""The norm of a sublayer's input joins the mixer that makes it, on targets with CUDA kernels.

collapsed, post, comb = dsv4.mhc_mix(X, fn, scale, base, ...); rms_norm(collapsed, w, eps)
    -> normed, post, comb = dsv4.mhc_mix_norm(X, fn, scale, base, w, ..., eps)

Only where nothing else reads the collapsed input.
"""

import operator

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.graph.annotations import get_flags, get_layer, get_parameter
from dsv4c.graph.emit import Emitter
from dsv4c.passes.operands import is_call
from dsv4c.passes.pass_manager import PassContext
from dsv4c.target import Feature

dsv4 = torch.ops.dsv4


def fuse_mhc_norm(gm: GraphModule, ctx: PassContext) -> PassResult:
    if Feature.CUDA not in ctx.target.features:
        return PassResult(gm, False)
    modified = False
    for mix in list(gm.graph.nodes):
        norm = _norm_of(mix)
        if norm is None:
            continue
        streams, fn, scale, base, iterations, hc_eps, norm_eps = mix.args
        _, weight, eps = norm.args
        with gm.graph.inserting_before(mix):
            emit = Emitter(gm.graph, get_layer(mix), get_flags(mix))
            operands = (streams, fn, scale, base, weight, iterations, hc_eps, norm_eps, eps)
            fused = emit.call("mhc_mix_norm", dsv4.mhc_mix_norm.default, *operands)
            normed = emit.call("mhc_normed", operator.getitem, fused, 0)
        norm.replace_all_uses_with(normed)
        for result in list(mix.users):
            if result.args[1] != 0:
                result.args = (fused, result.args[1])
        modified = True
    return PassResult(gm, modified)


def _norm_of(mix: Node) -> Node | None:
    """The norm that is all there is of the collapsed input of a mixer."""
    if not is_call(mix, dsv4.mhc_mix.default):
        return None
    collapsed = [result for result in mix.users if result.args[1] == 0]
    if len(collapsed) != 1 or len(collapsed[0].users) != 1:
        return None
    norm = next(iter(collapsed[0].users))
    if not is_call(norm, dsv4.rms_norm.default) or get_flags(norm) != get_flags(mix):
        return None
    # A weight of the model: it is there before the mixer. The operator has no form without one.
    weight = norm.args[1]
    return norm if isinstance(weight, Node) and get_parameter(weight) is not None else None
