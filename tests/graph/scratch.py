"""A graph of a few nodes, for tests of one pattern or of a near miss that the builder never writes."""

import torch
from torch.fx import Graph, GraphModule, Node

from dsv4c.checkpoint.formats import Encoding
from dsv4c.graph.annotations import GraphInfo, Numerics, Parameter, Placeholder, StatePlane, set_info
from dsv4c.graph.builder import OPERATOR_MODULES
from dsv4c.graph.emit import Emitter
from dsv4c.graph.scope import Placeholders, shared_symbols
from dsv4c.step_abi import Input, StateKind
from tests.fixtures import config_of
from tests.graph.small_models import CONFIGS

assert OPERATOR_MODULES  # their import registers the operators


class Scratch(Emitter):
    """Nodes are added with `call`; sizes may be "T", "R", "S", "B" or "M"."""

    def __init__(self) -> None:
        super().__init__(Graph())
        self._symbols = shared_symbols()
        self._placeholders = Placeholders(self.graph, self._symbols)

    def placeholder(self, name: str, what: Placeholder, shape: tuple[int | str, ...], dtype: torch.dtype) -> Node:
        return self._placeholders.add(name, what, shape, dtype)

    def weight(
        self,
        name: str,
        *shape: int,
        encoding: Encoding = Encoding.F32,
        block: tuple[int, int] | None = None,
        experts: int = 0,
    ) -> Node:
        """A weight of one source, its name; with `experts` the first size of `shape` is their number."""
        source = f"{name}.{{expert}}" if experts else name
        rows = shape[1] if experts else shape[0]
        what = Parameter((source,), (rows,), encoding, block, experts=experts)
        return self.placeholder(name.replace(".", "_"), what, shape, torch.float32)

    def rows(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        """A [T, *shape] operand; it says it is an input, whatever its shape."""
        return self.placeholder(name, Input.TOKEN_IDS, ("T", *shape), dtype)

    def plane(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        """A state plane [S, *shape]."""
        return self.placeholder(name, StatePlane(StateKind.SLOT, shape[0], 1), ("S", *shape), dtype)

    def finish(self, *results: Node, numerics: Numerics = "exact", config: str = "one_layer") -> GraphModule:
        self.graph.output(results)
        gm = GraphModule(torch.nn.Module(), self.graph)
        set_info(gm, GraphInfo(config_of(CONFIGS[config]), numerics, self._symbols.names(), 256))
        return gm
