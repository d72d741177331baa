"""Router and routed experts of a layer become one operator over packed experts, on targets that have its kernels.

    ids, weights = dsv4.route_topk(logits, bias, k, scale), or dsv4.route_hash(logits, table, token_ids, scale)
    dsv4.moe_ffn(x, ids, weights, codes13, scales13, codes2, scales2, ..., limit, 128)
        -> dsv4.placed_experts(x, logits, bias, table, token_ids, packed, topology, inner, k, scale, limit, group_sms)

The recipe's `[experts]` says how the experts are laid out and which SMs compute which; the topology is an integer table
among the weights, a row for each SM count of the target. Layers that the kernels cannot take stay as they are: other
numerics or storage, widths that 128 does not divide. Asked for a topology other than the default, that is an error.
Where `count_routing` has put its operator behind the router, the router stays too, for the ids that are counted.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.checkpoint.expert_packing import fits, record_bytes
from dsv4c.checkpoint.formats import Encoding
from dsv4c.errors import PassError
from dsv4c.graph.annotations import (
    Constant,
    Parameter,
    get_flags,
    get_layer,
    get_parameter,
    get_placeholder,
    note_unplaced_experts,
    value_of,
)
from dsv4c.graph.emit import Emitter
from dsv4c.graph.expert_ops import ACT_GROUP
from dsv4c.graph.topology import ExpertShapes, place
from dsv4c.passes.operands import is_call
from dsv4c.passes.pass_manager import PassContext
from dsv4c.passes.storage import placeholder_after
from dsv4c.recipe import ExpertsRecipe
from dsv4c.target import Feature, Target

dsv4 = torch.ops.dsv4

# What the kernels have room for.
MAX_EXPERTS, MAX_CHOICES = 512, 16
# With one, a step of one row has one place, for which all SMs would have to run at once (dsv4c/kernels/experts.md).
MIN_CHOICES = 2
_NEEDED = (Feature.CUDA, Feature.FP8_MMA, Feature.WGMMA)


@dataclass(frozen=True)
class _Router:
    """The operands of a router in the order of `placed_experts`."""

    logits: Node
    bias: Node | None
    table: Node | None
    token_ids: Node | None
    k: int
    scale: float


def place_experts(gm: GraphModule, ctx: PassContext) -> PassResult:
    recipe = ctx.recipe.experts
    if recipe is None or recipe.layout == "checkpoint" or Feature.CUDA not in ctx.target.features:
        return PassResult(gm, False)
    modified = False
    for ffn in list(gm.graph.nodes):
        if not is_call(ffn, dsv4.moe_ffn.default):
            continue
        router, packed = _router(ffn), _packed(ffn)
        obstacle = _obstacle(ffn, router, packed, ctx.target)
        if obstacle is not None:
            _require_default(ffn, obstacle, recipe)
            note_unplaced_experts(gm, obstacle)
            continue
        assert router is not None and packed is not None
        _replace(gm, ffn, router, packed, ctx.target, recipe)
        modified = True
    return PassResult(gm, modified)


def _router(ffn: Node) -> _Router | None:
    """The router whose only use is to choose the experts of `ffn`; who counts its choices uses none of them up."""
    ids, weights = ffn.args[1:3]
    if not is_call(ids, operator.getitem) or not is_call(weights, operator.getitem):
        return None
    assert isinstance(ids, Node) and isinstance(weights, Node)
    route = ids.args[0]
    if not is_call(route, dsv4.route_topk.default, dsv4.route_hash.default):
        return None
    assert isinstance(route, Node)
    counting = {user for user in ids.users if is_call(user, dsv4.count_routing.default)}
    alone = set(route.users) == {ids, weights} and set(ids.users) - counting == set(weights.users) == {ffn}
    if not alone or (ids.args[1], weights.args) != (0, (route, 1)) or get_flags(route) != get_flags(ffn):
        return None
    if route.target is dsv4.route_topk.default:
        logits, bias, k, scale = route.args
        return _Router(logits, bias, None, None, k, scale)  # type: ignore[arg-type]
    logits, table, token_ids, scale = route.args
    return _Router(logits, None, table, token_ids, int(value_of(ids).shape[1]), scale)  # type: ignore[arg-type]


def _packed(ffn: Node) -> Parameter | None:
    """The weights of `ffn` as one parameter; None where its stacks are stored differently, or without scales."""
    codes13, scales13, codes2, scales2 = (
        get_parameter(arg) if isinstance(arg, Node) else None for arg in ffn.args[3:7]
    )
    if codes13 is None or scales13 is None or codes2 is None or scales2 is None:
        return None
    if len(codes13.sources) != 2 or len(codes2.sources) != 1:
        return None
    sources, rows = codes13.sources + codes2.sources, codes13.rows + codes2.rows
    packed = replace(codes13, part="packed", sources=sources, rows=rows)
    same = replace(codes2, part="packed", sources=sources, rows=rows) == packed
    return packed if same else None


def _obstacle(ffn: Node, router: _Router | None, packed: Parameter | None, target: Target) -> str | None:
    """Why the kernels cannot take these experts."""
    x, *_, act_group = ffn.args
    assert isinstance(x, Node)
    missing = [feature.value for feature in _NEEDED if feature not in target.features]
    if missing:
        return f"target {target.name!r} has no {missing[0]}"
    if value_of(x).dtype != torch.bfloat16 or act_group != ACT_GROUP:
        return f"their inputs are not rounded to FP8 in groups of {ACT_GROUP} (reference numerics, FP8 or FP4 weights)"
    if router is None:
        return "something else uses the choice of their router"
    hidden = int(value_of(x).shape[1])
    if packed is None or not fits(packed.stored_as, packed.block, hidden, packed.rows[0]):
        return "they are not FP4 or FP8 in blocks of 128x128, in widths that 128 divides"
    if packed.stored_as is Encoding.FP4_GROUP and packed.float_scales:
        return "their FP4 scales are no exponents"
    if packed.experts > MAX_EXPERTS or router.k > MAX_CHOICES:
        return f"there are {packed.experts} of them and {router.k} a token, at most {MAX_EXPERTS} and {MAX_CHOICES} fit"
    if router.k < MIN_CHOICES:
        return "a token has one expert: all SMs would have to run at once for the kernels to go on"
    return None


def _require_default(ffn: Node, obstacle: str, recipe: ExpertsRecipe) -> None:
    if recipe.topology != "striped":
        raise PassError(
            f'%{ffn.name}: the experts cannot be placed (`experts.topology` is "{recipe.topology}"): {obstacle}',
            hint='use `topology = "striped"`: experts that cannot be placed then run in several launches',
        )


def _replace(
    gm: GraphModule, ffn: Node, router: _Router, packed: Parameter, target: Target, recipe: ExpertsRecipe
) -> None:
    x, _, _, codes, *_, limit, _ = ffn.args
    assert isinstance(x, Node) and isinstance(codes, Node)
    inner, hidden = packed.rows[0], packed.rows[2]
    stack_name = codes.name.removesuffix("_codes").removesuffix("_stored").removesuffix("_w13")
    shape = [packed.experts, record_bytes(packed.stored_as, hidden, inner)]
    experts = placeholder_after(gm, codes, f"{stack_name}_packed", packed, shape)
    shapes = ExpertShapes(packed.experts, hidden, inner)
    topology = _topology(gm, experts, shapes, target.sm_counts, recipe)
    group_sms = 0 if topology is None else recipe.group_sms
    with gm.graph.inserting_before(ffn):
        emit = Emitter(gm.graph, get_layer(ffn), get_flags(ffn))
        routing = (router.logits, router.bias, router.table, router.token_ids)
        settings = (inner, router.k, router.scale, limit, group_sms)
        operands = (x, *routing, experts, topology, *settings)
        placed = emit.call("placed_experts", dsv4.placed_experts.default, *operands)
    ffn.replace_all_uses_with(placed)


def _topology(
    gm: GraphModule, experts: Node, shapes: ExpertShapes, sm_counts: Sequence[int], recipe: ExpertsRecipe
) -> Node | None:
    """The table of this layer: one for all layers where nothing of a layer is in it; none for all SMs together."""
    if recipe.topology == "striped":
        return None
    layer, counts, name = None, None, "c_expert_topology"
    if recipe.trace is not None:
        layer = get_layer(experts)
        assert layer is not None
        counts, name = recipe.trace.counts(layer, shapes.experts), f"c_layers_{layer}_expert_topology"
    rows = [place(shapes, sms, recipe.topology, recipe.group_sms, counts).table() for sms in sm_counts]
    width = max(map(len, rows))
    values = tuple(value for row in rows for value in (*row, *[0] * (width - len(row))))
    what = Constant(values, torch.int32, layer)
    known = gm.graph.find_nodes(op="placeholder")
    made = next((node for node in known if node.name == name and get_placeholder(node) == what), None)
    return made or placeholder_after(gm, experts, name, what, [len(rows), width])
