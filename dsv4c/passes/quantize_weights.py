"""Every weight gets the form it is stored in; projections of quantised weights take quantised activations.

    dsv4.linear(x, w)  -> dsv4.linear(fp8_round(x, 128), codes, scales, block_rows, block_cols, dtype)
    dsv4.moe_ffn(...)  -> dsv4.moe_ffn(x, ids, weights, codes13, scales13, codes2, scales2, ..., act_group=128)
    anything else      -> the weight as stored (bf16, fp32, int64)

The recipe's `stored` keeps the bytes of the checkpoint. The rounding of activations is part of the reference numerics
only (spec 2.9); `wo_a` never takes it.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.checkpoint.formats import Encoding
from dsv4c.errors import PassError
from dsv4c.graph.annotations import get_flags, get_info, get_layer, get_parameter, value_of
from dsv4c.graph.emit import Emitter
from dsv4c.passes.pass_manager import PassContext
from dsv4c.passes.storage import Storage, store_parameter

dsv4 = torch.ops.dsv4

# Activations take one scale per token and 128 channels, whatever the weight's block is (spec 2.9).
ACT_GROUP = 128
QUANTIZED = (Encoding.FP8_BLOCK, Encoding.FP4_GROUP)


def quantize_weights(gm: GraphModule, ctx: PassContext) -> PassResult:
    rounds = get_info(gm).numerics == "reference"
    blocks = _expert_blocks(gm)
    stored = {node: _stored(gm, node, blocks) for node in list(gm.graph.nodes) if get_parameter(node)}
    rounded: dict[Node, Node] = {}
    for node in list(gm.graph.nodes):
        if node.target is dsv4.linear.default:
            x, weight, _, _, _, dtype = node.args
            if rounds and _is_quantized(weight):
                x = rounded.get(x) or rounded.setdefault(x, _rounded_input(gm, node, x))
            node.args = (x, *stored[weight], dtype)
        elif node.target is dsv4.grouped_linear.default:
            x, weight, *_, groups = node.args
            node.args = (x, *stored[weight], groups)
        elif node.target is dsv4.moe_ffn.default:
            x, ids, weights, w13, _, w2, _, _, _, limit, _ = node.args
            (codes13, scales13, rows, columns), (codes2, scales2, _, _) = stored[w13], stored[w2]
            group = ACT_GROUP if rounds and _is_quantized(w13) else 0
            node.args = (x, ids, weights, codes13, scales13, codes2, scales2, rows, columns, limit, group)
        else:
            node.args = tuple(_plain(node, arg, stored) for arg in node.args)
    return PassResult(gm, True)


def _expert_blocks(gm: GraphModule) -> dict[Node, tuple[int, int]]:
    """One scale block for both stacks of a layer's experts: the operator takes one."""
    blocks = {}
    for node in gm.graph.nodes:
        if node.target is not dsv4.moe_ffn.default:
            continue
        stacks = (node.args[3], node.args[5])
        found = [what.block for what in map(get_parameter, stacks) if what is not None]
        if (None in found and len(set(found)) > 1) or len({block[1] for block in found if block}) > 1:
            raise PassError(f"%{node.name}: w1/w3 and w2 have scale blocks of {found[0]} and {found[1]}")
        for stack in stacks:
            if found[0] and found[1]:
                blocks[stack] = (math.gcd(found[0][0], found[1][0]), found[0][1])
    return blocks


def _stored(gm: GraphModule, node: Node, blocks: dict[Node, tuple[int, int]]) -> Storage:
    what = get_parameter(node)
    assert what is not None
    if node in blocks:
        what = replace(what, block=blocks[node])
    return store_parameter(gm, node, f"{node.name}_stored", what, [int(size) for size in value_of(node).shape])


def _is_quantized(weight: Node) -> bool:
    what = get_parameter(weight)
    return what is not None and what.encoding in QUANTIZED


def _rounded_input(gm: GraphModule, user: Node, x: Node) -> Node:
    with gm.graph.inserting_before(user):
        emit = Emitter(gm.graph, get_layer(user), get_flags(user))
        return emit.call("act_fp8", dsv4.fp8_round.default, x, ACT_GROUP, int(value_of(x).shape[-1]))


def _plain(user: Node, arg: Any, stored: dict[Node, Storage]) -> Any:
    """The stored form of a weight that is used as it is, without scales."""
    if not isinstance(arg, Node) or arg not in stored:
        return arg
    codes, scales, _, _ = stored[arg]
    if scales is not None:
        what = get_parameter(arg)
        assert what is not None
        raise PassError(
            f"{what.sources[0]} is stored as {what.encoding.value}; {user.target} reads it without scales",
            hint="the model keeps this tensor in bf16 or fp32; convert the checkpoint",
        )
    return codes
