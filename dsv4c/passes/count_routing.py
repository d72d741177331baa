"""Every router gets an operator that counts its choices, where the recipe's `[experts] counts` asks for it.

    ids, weights = dsv4.route_topk(...) or dsv4.route_hash(...)
        -> the same, and dsv4.count_routing(ids, counts)

`counts` is a state plane of the layer that belongs to the session and to none of its slots. The numbers of the model
stay as they are. The counting reads the ids of the router, so a router that `place_experts` joins with the experts
stays beside them: it chooses the same once more, for the counts alone.
"""

import operator

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.errors import PassError
from dsv4c.graph.annotations import StatePlane, get_flags, get_info, get_layer, value_of
from dsv4c.graph.emit import Emitter
from dsv4c.passes.operands import is_call
from dsv4c.passes.pass_manager import PassContext
from dsv4c.passes.storage import placeholder_after
from dsv4c.step_abi import StateKind

dsv4 = torch.ops.dsv4


def count_routing(gm: GraphModule, ctx: PassContext) -> PassResult:
    if not ctx.recipe.counts_routing:
        return PassResult(gm, False)
    chosen = [ids for node in gm.graph.nodes if (ids := _uncounted_ids(node)) is not None]
    expected = len(get_info(gm).config.layers)
    if len(chosen) != expected:
        raise PassError(
            f"count_routing found {len(chosen)} routers to count; the model has {expected}",
            hint="run it once, behind fuse_router",
        )
    last = _last_placeholders(gm)
    for ids in chosen:
        _count(gm, ids, last[get_layer(ids)])
    return PassResult(gm, True)


def _uncounted_ids(node: Node) -> Node | None:
    """The ids that a router gives to its layer, unless they are counted already."""
    if not is_call(node, operator.getitem) or node.args[1] != 0:
        return None
    if not is_call(node.args[0], dsv4.route_topk.default, dsv4.route_hash.default):
        return None
    return None if any(is_call(user, dsv4.count_routing.default) for user in node.users) else node


def _last_placeholders(gm: GraphModule) -> dict[int | None, Node]:
    """By layer."""
    return {get_layer(node): node for node in gm.graph.find_nodes(op="placeholder")}


def _count(gm: GraphModule, ids: Node, anchor: Node) -> None:
    router, layer = ids.args[0], get_layer(ids)
    assert isinstance(router, Node) and isinstance(router.args[0], Node)
    experts = int(value_of(router.args[0]).shape[1])
    emit = Emitter(gm.graph, layer, get_flags(ids))
    what = StatePlane(StateKind.ROUTING_COUNTS, experts, 1)
    counts = placeholder_after(gm, anchor, f"s_{emit.name('routing_counts')}", what, [1, experts])
    with gm.graph.inserting_after(ids):
        emit.call("count_routing", dsv4.count_routing.default, ids, counts)
