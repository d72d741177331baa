"""The rotation that takes the values' positions off joins the attention, on targets with CUDA kernels.

rope(dsv4.attention(q, ..., positions, ...), positions, freqs, True) -> dsv4.attention_unrotated(q, ..., freqs)

Only at the attention's own positions, and where nothing else reads its result.
"""

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.graph.annotations import get_flags, get_layer
from dsv4c.graph.emit import Emitter
from dsv4c.passes.operands import is_call
from dsv4c.passes.pass_manager import PassContext
from dsv4c.target import Feature

dsv4 = torch.ops.dsv4

_POSITIONS = 9  # argument of the attention


def fuse_attention_rope(gm: GraphModule, ctx: PassContext) -> PassResult:
    if Feature.CUDA not in ctx.target.features:
        return PassResult(gm, False)
    modified = False
    for attention in list(gm.graph.nodes):
        rope = _rope_of(attention)
        if rope is None:
            continue
        # In the place of the attention: the commit of the step's keys, which follows it, must stay behind.
        with gm.graph.inserting_before(attention):
            emit = Emitter(gm.graph, get_layer(attention), get_flags(attention))
            operands = (*attention.args, rope.args[2])
            fused = emit.call("attention_unrotated", dsv4.attention_unrotated.default, *operands)
        rope.replace_all_uses_with(fused)
        modified = True
    return PassResult(gm, modified)


def _rope_of(attention: Node) -> Node | None:
    """The rotation that is all there is of the result of an attention."""
    if not is_call(attention, dsv4.attention.default) or len(attention.users) != 1:
        return None
    rope = next(iter(attention.users))
    if not is_call(rope, dsv4.rope.default) or get_flags(rope) != get_flags(attention):
        return None
    _, positions, freqs, inverse = rope.args
    fits = positions is attention.args[_POSITIONS] and inverse is True
    return rope if fits and isinstance(freqs, Node) and freqs.op == "placeholder" else None
