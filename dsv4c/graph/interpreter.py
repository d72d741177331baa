"""Running a graph eagerly on the CPU: the oracle for every stage below.

Works after any pass, from the plain aten graph to the one that is lowered. Weights are loaded when their first user
runs and dropped after their last.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dsv4c.checkpoint.checkpoint import Checkpoint
from dsv4c.graph.annotations import Constant, Parameter, StatePlane, get_info, get_placeholder, value_of
from dsv4c.graph.parameters import WeightReader, load_constant
from dsv4c.step_abi import Input, StateKind


class Oracle:
    """A session on a graph: state for `slots` sequences of up to `context` positions, and `step`.

    `poison` fills fresh state with NaN bytes: nothing may read what no step wrote.
    """

    def __init__(
        self, gm: GraphModule, checkpoint: Checkpoint, slots: int = 1, context: int = 2048, *, poison: bool = False
    ) -> None:
        self.gm = gm
        self._weights = WeightReader(checkpoint)
        per_slot = -(-context // get_info(gm).block_tokens)
        self.block_table = torch.arange(slots * per_slot, dtype=torch.int32).view(slots, per_slot)
        self.state: dict[str, Tensor] = {}
        self._last_use = _last_uses(gm)
        for node in gm.graph.nodes:
            if node.op == "placeholder" and isinstance(what := get_placeholder(node), StatePlane):
                value = value_of(node)
                shape = (what.kind.units(slots, slots * per_slot), *map(int, value.shape[1:]))
                # What is counted is added to.
                fill = 0xFF if poison and what.kind is not StateKind.ROUTING_COUNTS else 0
                count = value.element_size() * torch.Size(shape).numel()
                self.state[node.name] = torch.full((count,), fill, dtype=torch.uint8).view(value.dtype).view(shape)

    @torch.no_grad()
    def step(
        self,
        token_ids: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        logits_rows: Sequence[int] | None = None,
        *,
        trace: dict[str, Any] | None = None,
    ) -> Tensor:
        """Float32 logits [R, V] of the asked rows (None: all). `trace` receives every node's result by name."""
        rows = list(range(len(token_ids))) if logits_rows is None else list(logits_rows)
        inputs = {
            Input.TOKEN_IDS: torch.tensor(token_ids, dtype=torch.int32),
            Input.SLOTS: torch.tensor(slots, dtype=torch.int32),
            Input.POSITIONS: torch.tensor(positions, dtype=torch.int32),
            Input.BLOCK_TABLE: self.block_table,
            Input.LOGITS_ROWS: torch.tensor(rows, dtype=torch.int32),
            Input.TEMPERATURE: torch.zeros(len(rows)),
            Input.TOP_K: torch.zeros(len(rows), dtype=torch.int32),
            Input.TOP_P: torch.ones(len(rows)),
            Input.SEED: torch.zeros(len(rows), dtype=torch.int64),
            Input.MASK: torch.full((len(rows), -(-get_info(self.gm).config.vocab_size // 32)), -1, dtype=torch.int32),
        }
        logits, _ = self._run(inputs, trace)
        assert isinstance(logits, Tensor)
        return logits

    def _run(self, inputs: Mapping[Input, Tensor], trace: dict[str, Any] | None) -> Any:
        values: dict[Node, Any] = {}

        def value(node: Node) -> Any:
            if node not in values:
                values[node] = self._load(node, inputs)
            return values[node]

        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                continue
            args = map_arg(node.args, value)
            if node.op == "output":
                return args[0]
            values[node] = node.target(*args, **map_arg(node.kwargs, value))
            if trace is not None:
                trace[node.name] = values[node]
            for dead in self._last_use[node]:
                values.pop(dead, None)
        raise AssertionError("a graph without an output")

    def _load(self, node: Node, inputs: Mapping[Input, Tensor]) -> Tensor:
        what = get_placeholder(node)
        if isinstance(what, Input):
            return inputs[what]
        if isinstance(what, StatePlane):
            return self.state[node.name]
        if isinstance(what, Constant):
            return load_constant(what).view(value_of(node).shape)
        assert isinstance(what, Parameter)
        loaded = self._weights.load(what)
        wanted = value_of(node).dtype
        return loaded.view(wanted) if what.part != "values" else loaded.to(wanted)


def _last_uses(gm: GraphModule) -> dict[Node, list[Node]]:
    """For each node, the nodes whose value nothing needs after it."""
    last: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        for used in node.all_input_nodes:
            last[used] = node
    ends: dict[Node, list[Node]] = {node: [] for node in gm.graph.nodes}
    for used, user in last.items():
        ends[user].append(used)
    return ends
