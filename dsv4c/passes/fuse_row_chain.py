"""Operators on rows that follow one another become one, on targets with CUDA kernels.

rms_norm(x, w, eps) -> rope(., positions, freqs, inverse) -> hadamard(.) -> fp8_round(., group, width)
    -> dsv4.row_chain(x, w, positions, freqs, True, eps, inverse, True, 1, group, width)

Any two or more of them in this order, the last one fp8_round or fp4_round; nothing else may use what is between, and
no view may stand there: norm, transform and groups are along the last axis, which a reshape changes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.graph.annotations import get_flags, get_layer
from dsv4c.graph.emit import Emitter
from dsv4c.graph.fused_ops import RowRounding
from dsv4c.passes.operands import is_call
from dsv4c.passes.pass_manager import PassContext
from dsv4c.target import Feature

dsv4 = torch.ops.dsv4

# The place of each operator in a chain.
_ORDER: dict[Any, int] = {
    dsv4.rms_norm.default: 0,
    dsv4.rope.default: 1,
    dsv4.hadamard.default: 2,
    dsv4.fp8_round.default: 3,
    dsv4.fp4_round.default: 3,
}


def fuse_row_chain(gm: GraphModule, ctx: PassContext) -> PassResult:
    if Feature.CUDA not in ctx.target.features:
        return PassResult(gm, False)
    modified = False
    taken: set[Node] = set()
    for node in list(gm.graph.nodes):
        if node in taken or not is_call(node, *_ORDER):
            continue
        chain = _chain(node)
        if len(chain) < 2:
            continue
        taken.update(chain)
        layer = get_layer(node)
        with gm.graph.inserting_before(chain[-1]):
            emit = Emitter(gm.graph, layer, get_flags(node))
            name = f"{node.name.removeprefix(f'l{layer}_')}_chain"
            fused = emit.call(name, dsv4.row_chain.default, node.args[0], *_operands(chain))
        chain[-1].replace_all_uses_with(fused)
        modified = True
    return PassResult(gm, modified)


def _chain(first: Node) -> list[Node]:
    """The longest chain that starts with `first`."""
    chain = [first]
    while len(chain[-1].users) == 1:
        last, user = chain[-1], next(iter(chain[-1].users))
        follows = is_call(user, *_ORDER) and _ORDER[user.target] > _ORDER[last.target]
        if not follows or user.args[0] is not last or last in user.args[1:] or get_flags(user) != get_flags(first):
            break
        chain.append(user)
    return chain


def _operands(chain: Sequence[Node]) -> tuple[Any, ...]:
    """The arguments of `row_chain` after x."""
    weight = positions = freqs = None
    norm = inverse = hadamard = False
    eps = 0.0
    rounding, group, width = RowRounding.NONE, 0, 0
    for node in chain:
        operands: tuple[Any, ...] = node.args[1:]
        if node.target is dsv4.rms_norm.default:
            norm = True
            weight, eps = operands
        elif node.target is dsv4.rope.default:
            positions, freqs, inverse = operands
        elif node.target is dsv4.hadamard.default:
            hadamard = True
        elif node.target is dsv4.fp8_round.default:
            rounding, (group, width) = RowRounding.FP8, operands
        else:
            rounding, (group,) = RowRounding.FP4, operands
    return weight, positions, freqs, norm, eps, inverse, hadamard, int(rounding), group, width
