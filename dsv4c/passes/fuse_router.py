"""The router becomes one operator.

s = sqrt(softplus(l)); ids = topk(s + bias); w = s[ids] / sum * scale -> dsv4.route_topk(l, bias, k, scale)
s = sqrt(softplus(l)); ids = table[token];   w = s[ids] / sum * scale -> dsv4.route_hash(l, table, token, scale)
"""

import operator
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.errors import PassError
from dsv4c.graph import moe
from dsv4c.graph.annotations import get_info
from dsv4c.graph.emit import Emitter
from dsv4c.passes.match import Binding
from dsv4c.passes.pass_manager import PassContext
from dsv4c.passes.rewrite import Pattern, replace_matches

dsv4 = torch.ops.dsv4


def fuse_router(gm: GraphModule, ctx: PassContext) -> PassResult:
    layers = get_info(gm).config.layers
    expected = (sum(not layer.hash_routed for layer in layers), sum(layer.hash_routed for layer in layers))
    found = (_fuse_score_routers(gm), _fuse_hash_routers(gm))
    if found != expected:
        raise PassError(
            f"fuse_router found {found} score and hash routers; the model has {expected}",
            hint="no kernel exists for the unfused form; run fuse_router before passes that rewrite the router",
        )
    return PassResult(gm, True)


def _pair(emit: Emitter, routed: Node) -> Sequence[Node]:
    weights = emit.call("route_weights", operator.getitem, routed, 1)
    return [weights, emit.call("route_ids", operator.getitem, routed, 0)]


def _fuse_score_routers(gm: GraphModule) -> int:
    p = Pattern(gm)
    config = p.info.config
    logits, bias = p.rows("logits", config.n_routed_experts), p.operand("bias", config.n_routed_experts)
    scores = moe.scores(p, logits)
    ids = moe.choose_by_score(p, scores, bias, config)
    weights = moe.route_weights(p, scores, ids, config)

    def build(emit: Emitter, bound: Binding) -> Sequence[Node]:
        settings = (config.num_experts_per_tok, config.routed_scaling_factor)
        return _pair(emit, emit.call("route", dsv4.route_topk.default, bound[logits], bound[bias], *settings))

    return replace_matches(gm, (weights, ids), build)


def _fuse_hash_routers(gm: GraphModule) -> int:
    p = Pattern(gm)
    config = p.info.config
    logits = p.rows("logits", config.n_routed_experts)
    table = p.operand("table", config.vocab_size, config.num_experts_per_tok, dtype=torch.int64)
    tokens = p.rows("tokens", dtype=torch.int32)
    ids = moe.choose_by_token(p, tokens, table)
    weights = moe.route_weights(p, moe.scores(p, logits), ids, config)

    def build(emit: Emitter, bound: Binding) -> Sequence[Node]:
        operands = (bound[logits], bound[table], bound[tokens])
        return _pair(emit, emit.call("route", dsv4.route_hash.default, *operands, config.routed_scaling_factor))

    return replace_matches(gm, (weights, ids), build)
