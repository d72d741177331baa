"""Replacing every match of a pattern by new nodes: the frame that the pattern-based fusions share."""

from collections.abc import Callable, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from dsv4c.graph.annotations import GraphInfo, get_flags, get_info, get_layer
from dsv4c.graph.emit import Emitter
from dsv4c.passes.match import Binding, matches


class Pattern(Emitter):
    """A scratch graph on which a pattern is written; `operand` makes the placeholders that match anything."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(Graph())
        self.info: GraphInfo = get_info(gm)
        token_ids = next(iter(gm.graph.nodes)).meta["val"]
        self._mode, self._tokens = token_ids.fake_mode, token_ids.shape[0]
        self.act_dtype = torch.bfloat16 if self.info.numerics == "reference" else torch.float32

    def operand(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        node = self.graph.placeholder(name)
        with self._mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def rows(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        """An operand with a leading T."""
        node = self.graph.placeholder(name)
        with self._mode:
            node.meta["val"] = torch.empty((self._tokens, *shape), dtype=dtype)
        return node


Build = Callable[[Emitter, Binding], Sequence[Node]]


def replace_matches(gm: GraphModule, roots: Sequence[Node], build: Build) -> int:
    """Replace the results of every match by the nodes that `build` makes of its binding; returns how many.

    `roots` are the pattern's results (see `match.matches` for their order), `build` returns one node for each.
    """
    count = 0
    for bound in matches(gm.graph, roots):
        found = [bound[root] for root in roots]
        # The earliest result: all operands of the pattern come before it.
        first = next(node for node in gm.graph.nodes if node in found)
        with gm.graph.inserting_before(first):
            built = build(Emitter(gm.graph, get_layer(first), get_flags(first)), bound)
        for old, new in zip(found, built, strict=True):
            old.replace_all_uses_with(new)
        count += 1
    gm.graph.eliminate_dead_code()
    return count
