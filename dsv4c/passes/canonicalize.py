"""One form for equal things, so that later patterns need not know the variants.

reshape(x, its own shape)     -> x
_to_copy(x, its own dtype)    -> x
f(x), later f(x) again        -> the first, for pure aten operators
"""

from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.graph.annotations import get_flags, value_of
from dsv4c.passes.operands import CASTS, RESHAPES
from dsv4c.passes.pass_manager import PassContext


def canonicalize(gm: GraphModule, ctx: PassContext) -> PassResult:
    modified = False
    seen: dict[Any, Node] = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or getattr(node.target, "namespace", None) != "aten":
            continue
        same = _unchanged_input(node) or seen.setdefault(_key(node), node)
        if same is not node:
            node.replace_all_uses_with(same)
            gm.graph.erase_node(node)
            modified = True
    return PassResult(gm, modified)


def _unchanged_input(node: Node) -> Node | None:
    """The input of a cast or a reshape that changes nothing."""
    if node.target not in (*CASTS, *RESHAPES):
        return None
    source = node.args[0]
    assert isinstance(source, Node)
    before, after = value_of(source), value_of(node)
    return source if before.dtype == after.dtype and before.shape == after.shape else None


def _key(node: Node) -> Any:
    """Hashable identity of a call; flags take part, since a node of the head must not replace one that always runs."""

    def frozen(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(frozen(v) for v in value)
        return (type(value), value)

    return (
        node.target,
        frozen(node.args),
        tuple((k, frozen(v)) for k, v in sorted(node.kwargs.items())),
        get_flags(node),
    )
