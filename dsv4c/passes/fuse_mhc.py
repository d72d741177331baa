"""The mHC chains become one operator each: a mixer with its 20 Sinkhorn rounds is about 120 nodes.

    linear(rms_norm(flat X), fn), ..., sigmoid, softmax, (div, sum) x 2n -> dsv4.mhc_mix(X, fn, scale, base, ...)
    post * y + bmm(comb^T, X)                                            -> dsv4.mhc_combine(y, X, post, comb)
    sum(sigmoid(linear(...) * scale + base) * X)                         -> dsv4.mhc_head(X, fn, scale, base, ...)

The patterns are written by the functions that build the graph, so they are the model's own.
"""

import operator
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.errors import PassError
from dsv4c.graph import hyper_connections
from dsv4c.graph.annotations import get_info
from dsv4c.graph.emit import Emitter
from dsv4c.passes.match import Binding
from dsv4c.passes.pass_manager import PassContext
from dsv4c.passes.rewrite import Pattern, replace_matches

dsv4 = torch.ops.dsv4


def fuse_mhc(gm: GraphModule, ctx: PassContext) -> PassResult:
    found = (_fuse_mixers(gm), _fuse_combines(gm), _fuse_head(gm))
    layers = get_info(gm).config.num_hidden_layers
    expected = (2 * layers, 2 * layers, 1)
    if found != expected:
        raise PassError(
            f"fuse_mhc found {found} mixers, combines and heads; {layers} layers have {expected}",
            hint="no kernel exists for the unfused form; run fuse_mhc before passes that rewrite norms or linears",
        )
    return PassResult(gm, True)


def _streams(p: Pattern) -> Node:
    config = p.info.config
    return p.rows("streams", config.hc_mult, config.hidden_size, dtype=p.act_dtype)


def _fuse_mixers(gm: GraphModule) -> int:
    p = Pattern(gm)
    config = p.info.config
    n = config.hc_mult
    streams, fn = _streams(p), p.operand("fn", (2 + n) * n, n * config.hidden_size)
    scale, base = p.operand("scale", 3), p.operand("base", (2 + n) * n)
    collapsed, post, comb = hyper_connections.mix(p, "hc", streams, fn, scale, base, config, p.act_dtype)

    def build(emit: Emitter, bound: Binding) -> Sequence[Node]:
        operands = [bound[operand] for operand in (streams, fn, scale, base)]
        settings = (config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)
        mixed = emit.call("mhc_mix", dsv4.mhc_mix.default, *operands, *settings)
        names = (("mhc_comb", 2), ("mhc_post", 1), ("mhc_in", 0))
        return [emit.call(name, operator.getitem, mixed, index) for name, index in names]

    return replace_matches(gm, (comb, post, collapsed), build)


def _fuse_combines(gm: GraphModule) -> int:
    p = Pattern(gm)
    config = p.info.config
    n = config.hc_mult
    y, streams = p.rows("y", config.hidden_size, dtype=p.act_dtype), _streams(p)
    post, comb = p.rows("post", n), p.rows("comb", n, n)
    root = hyper_connections.combine(p, "hc", y, streams, post, comb, p.act_dtype)

    def build(emit: Emitter, bound: Binding) -> Sequence[Node]:
        operands = [bound[operand] for operand in (y, streams, post, comb)]
        return [emit.call("mhc_combine", dsv4.mhc_combine.default, *operands)]

    return replace_matches(gm, (root,), build)


def _fuse_head(gm: GraphModule) -> int:
    p = Pattern(gm)
    config = p.info.config
    n = config.hc_mult
    streams, fn = _streams(p), p.operand("fn", n, n * config.hidden_size)
    scale, base = p.operand("scale", 1), p.operand("base", n)
    root = hyper_connections.head(p, streams, fn, scale, base, config, p.act_dtype)

    def build(emit: Emitter, bound: Binding) -> Sequence[Node]:
        operands = [bound[operand] for operand in (streams, fn, scale, base)]
        return [emit.call("mhc_head", dsv4.mhc_head.default, *operands, config.hc_eps, config.rms_norm_eps)]

    return replace_matches(gm, (root,), build)
