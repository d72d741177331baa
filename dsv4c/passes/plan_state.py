"""Lays the state out: which planes there are, how wide their rows lie, and what a slot and a block cost.

The result is an annotation of the graph (`StateLayout`); the plan writes it into the engine and `plan` reports it.
"""

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.graph.annotations import (
    PlannedPlane,
    StateLayout,
    StatePlane,
    get_layer,
    get_placeholder,
    set_state_layout,
    value_of,
)
from dsv4c.passes.pass_manager import PassContext


def plan_state(gm: GraphModule, ctx: PassContext) -> PassResult:
    planes = []
    for node in gm.graph.nodes:
        if node.op == "placeholder" and isinstance(what := get_placeholder(node), StatePlane):
            value = value_of(node)
            row = value.element_size()
            for size in value.shape[2:]:
                row *= int(size)
            planes.append(PlannedPlane(node.name, what.kind, get_layer(node), what.rows, what.ratio, row, value.dtype))
    set_state_layout(gm, StateLayout(tuple(planes)))
    return PassResult(gm, False)
