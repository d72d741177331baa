"""Every weight gets the form it is stored in; projections of quantised weights take quantised activations.

    dsv4.linear(x, w)  -> dsv4.linear(fp8_round(x, 128), codes, scales, block_rows, block_cols, dtype)
    dsv4.moe_ffn(...)  -> dsv4.moe_ffn(x, ids, weights, codes13, scales13, codes2, scales2, ..., act_group=128)
    anything else      -> the weight as stored (bf16, fp32, int64)

The recipe's `stored` keeps the bytes of the checkpoint; other choices are noted in the `Parameter`, and the bytes are
made of its values when they are read. What is quantised are the tensors that the released models quantise: routed
experts, shared experts and the projections of attention and indexer. Asked for the encoding that a tensor is stored in,
the pass keeps its bytes; asked for another one, the engine is made of the decoded values: the released checkpoints are
FP8 and FP4, and a target without them needs integers. The build reports what that costs.

The rounding of activations is part of the reference numerics only, and goes with FP8 and FP4 weights (spec 2.9);
`wo_a` never takes it.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.checkpoint.config import ModelConfig
from dsv4c.checkpoint.formats import FP4_GROUP, Encoding
from dsv4c.checkpoint.quantization import Quantization
from dsv4c.checkpoint.tensor_classes import DENSE, EXPERT
from dsv4c.errors import PassError
from dsv4c.graph.annotations import Parameter, get_flags, get_info, get_layer, get_parameter, value_of
from dsv4c.graph.emit import Emitter
from dsv4c.graph.parameters import unstraddled_block
from dsv4c.passes.pass_manager import PassContext
from dsv4c.passes.storage import Storage, store_parameter
from dsv4c.recipe import GROUPS, WeightsRecipe

dsv4 = torch.ops.dsv4

# Activations take one scale per token and 128 channels, whatever the weight's block is (spec 2.9).
ACT_GROUP = 128
TAKE_FP8_INPUTS = (Encoding.FP8_BLOCK, Encoding.FP4_GROUP)
ENCODINGS = {
    "fp8": Encoding.FP8_BLOCK,
    "fp4": Encoding.FP4_GROUP,
    "int8": Encoding.INT8_GROUP,
    "int4": Encoding.INT4_GROUP,
}


def quantize_weights(gm: GraphModule, ctx: PassContext) -> PassResult:
    rounds = get_info(gm).numerics == "reference"
    chosen = _chosen(gm, ctx.recipe.weights)
    stored = {node: _stored(gm, node, what) for node, what in chosen.items()}
    rounded: dict[Node, Node] = {}
    for node in list(gm.graph.nodes):
        if node.target is dsv4.linear.default:
            x, weight, _, _, _, dtype = node.args
            if rounds and chosen[weight].stored_as in TAKE_FP8_INPUTS:
                x = rounded.get(x) or rounded.setdefault(x, _rounded_input(gm, node, x))
            node.args = (x, *stored[weight], dtype)
        elif node.target is dsv4.grouped_linear.default:
            x, weight, *_, groups = node.args
            node.args = (x, *stored[weight], groups)
        elif node.target is dsv4.moe_ffn.default:
            x, ids, weights, w13, _, w2, _, _, _, limit, _ = node.args
            (codes13, scales13, rows, columns), (codes2, scales2, _, _) = stored[w13], stored[w2]
            group = ACT_GROUP if rounds and chosen[w13].stored_as in TAKE_FP8_INPUTS else 0
            node.args = (x, ids, weights, codes13, scales13, codes2, scales2, rows, columns, limit, group)
        else:
            node.args = tuple(_plain(node, arg, chosen, stored) for arg in node.args)
    return PassResult(gm, True)


def _chosen(gm: GraphModule, recipe: WeightsRecipe) -> dict[Node, Parameter]:
    """Every weight with what the recipe makes of it."""
    config = get_info(gm).config
    weights = {
        node: _quantized(what, int(value_of(node).shape[-1]), recipe, config)
        for node in gm.graph.nodes
        if (what := get_parameter(node)) is not None
    }
    for node in gm.graph.nodes:
        if node.target is dsv4.moe_ffn.default:
            _share_block(node, weights)
    return weights


def _quantized(what: Parameter, columns: int, recipe: WeightsRecipe, config: ModelConfig) -> Parameter:
    name = what.sources[0].format(expert=0)
    if EXPERT.fullmatch(name):
        key, choice, group = "experts", recipe.experts, recipe.experts_group
    elif DENSE.fullmatch(name):
        key, choice, group = "dense", recipe.dense, recipe.dense_group
    else:
        return what
    if choice == "stored" or ENCODINGS[choice] is what.encoding:
        return what
    if choice == "fp8":
        block = config.weight_block_size
    elif choice == "fp4":
        block = (1, FP4_GROUP)
    else:
        block = (1, group)
    if choice != "fp8" and columns % block[1]:
        raise PassError(
            f"{what.sources[0]} has {columns} inputs, which groups of {block[1]} do not divide "
            f"(`weights.{key}` is {choice!r})",
            hint=_other_choice(key, choice, columns),
        )
    how = Quantization(ENCODINGS[choice], block, recipe.rounding == "search")
    return replace(what, quantization=how, block=unstraddled_block(block, what.rows), float_scales=False)


def _other_choice(key: str, choice: str, columns: int) -> str:
    dividing = [group for group in GROUPS if columns % group == 0]
    if choice != "fp4" and dividing:
        return f"set `weights.{key}_group` to {dividing[-1]}"
    return f'use `{key} = "fp8"`, whose blocks may be partial, or `{key} = "stored"`'


def _share_block(moe_ffn: Node, weights: dict[Node, Parameter]) -> None:
    """One scale block for both stacks of a layer's experts: the operator takes one."""
    stacks = [arg for arg in (moe_ffn.args[3], moe_ffn.args[5]) if isinstance(arg, Node)]
    first, second = (weights[stack].block for stack in stacks)
    if first == second:
        return
    if first is None or second is None or first[1] != second[1]:
        raise PassError(f"%{moe_ffn.name}: w1/w3 and w2 have scale blocks of {first} and {second}")
    for stack in stacks:
        weights[stack] = replace(weights[stack], block=(math.gcd(first[0], second[0]), first[1]))


def _stored(gm: GraphModule, node: Node, what: Parameter) -> Storage:
    return store_parameter(gm, node, f"{node.name}_stored", what, [int(size) for size in value_of(node).shape])


def _rounded_input(gm: GraphModule, user: Node, x: Node) -> Node:
    with gm.graph.inserting_before(user):
        emit = Emitter(gm.graph, get_layer(user), get_flags(user))
        return emit.call("act_fp8", dsv4.fp8_round.default, x, ACT_GROUP, int(value_of(x).shape[-1]))


def _plain(user: Node, arg: Any, weights: dict[Node, Parameter], stored: dict[Node, Storage]) -> Any:
    """The stored form of a weight that is used as it is, without scales."""
    if not isinstance(arg, Node) or arg not in stored:
        return arg
    codes, scales, _, _ = stored[arg]
    if scales is not None:
        what = weights[arg]
        raise PassError(
            f"{what.sources[0]} is stored as {what.stored_as.value}; {user.target} reads it without scales",
            hint="the model keeps this tensor in bf16 or fp32; convert the checkpoint",
        )
    return codes
