"""Where every weight lies in the WEIGHTS section.

In the order of the graph, so that a step reads forward. The matrices of one expert (w1 and w3, w2, and their scales, or
its packed record) are contiguous and start on a page: an expert can be mapped, streamed or moved alone.
"""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from dsv4c.graph.annotations import Constant, Parameter, get_placeholder, value_of
from dsv4c.plan.execution_plan import Extent, WeightLayout

ALIGNMENT = 64
EXPERT_ALIGNMENT = 4096


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _matrix_bytes(node: Node) -> int:
    """Bytes of a weight, of one expert where it is a stack."""
    value = value_of(node)
    what = get_placeholder(node)
    stacked = isinstance(what, Parameter) and what.experts > 0
    count = 1
    for size in value.shape[1:] if stacked else value.shape:
        count *= int(size)
    return count * value.element_size()


@dataclass(frozen=True)
class WeightPlace:
    """The byte offset of a weight, and for a stack the bytes from one expert to the next."""

    offset: int
    expert_stride: int = 0


class _Writer:
    def __init__(self) -> None:
        self.offset = 0
        self.extents: list[Extent] = []
        self.places: dict[str, WeightPlace] = {}

    def add(self, node: Node) -> None:
        what = get_placeholder(node)
        self.offset = _align(self.offset, ALIGNMENT)
        self.places[node.name] = WeightPlace(self.offset)
        if isinstance(what, Constant):
            self._extent("", what, _matrix_bytes(node))
        else:
            assert isinstance(what, Parameter)
            self._sources(node, what, None)

    def add_experts(self, nodes: list[Node]) -> None:
        parameters = [what for node in nodes if isinstance(what := get_placeholder(node), Parameter)]
        first = self.offset = _align(self.offset, EXPERT_ALIGNMENT)
        for expert in range(parameters[0].experts):
            for node, what in zip(nodes, parameters, strict=True):
                self.offset = _align(self.offset, ALIGNMENT)
                if expert == 0:
                    self.places[node.name] = WeightPlace(self.offset)
                self._sources(node, what, expert)
            self.offset = _align(self.offset, EXPERT_ALIGNMENT)
            if expert == 0:
                stride = self.offset - first
        for node in nodes:
            self.places[node.name] = WeightPlace(self.places[node.name].offset, stride)

    def _sources(self, node: Node, what: Parameter, expert: int | None) -> None:
        if what.part == "packed":
            self._extent(what.source_names(expert)[0], what, _matrix_bytes(node), expert)
            return
        total, rows = _matrix_bytes(node), sum(what.rows)
        for name, count in zip(what.source_names(expert), what.rows, strict=True):
            covered = count if what.part == "codes" or what.block is None else -(-count // what.block[0])
            all_rows = rows if what.part == "codes" or what.block is None else -(-rows // what.block[0])
            self._extent(name, what, total * covered // all_rows)

    def _extent(self, source: str, what: Parameter | Constant, size_bytes: int, expert: int | None = None) -> None:
        self.extents.append(Extent(self.offset, size_bytes, source, what, expert))
        self.offset += size_bytes


def layout_weights(gm: GraphModule) -> tuple[WeightLayout, dict[str, WeightPlace]]:
    """The layout, and the place of every weight placeholder by name."""
    writer = _Writer()
    stacks = {node.name: found for node in gm.graph.nodes if (found := _experts_of(node))}
    owner = {node.name: name for name, nodes in stacks.items() for node in nodes}
    for node in gm.graph.nodes:
        if node.op != "placeholder" or not isinstance(get_placeholder(node), Parameter | Constant):
            continue
        if node.name not in owner:
            writer.add(node)
        elif node.name not in writer.places:
            writer.add_experts(stacks[owner[node.name]])
    return WeightLayout(tuple(writer.extents), _align(writer.offset, EXPERT_ALIGNMENT)), writer.places


def _experts_of(node: Node) -> list[Node]:
    """The expert stacks that an operator reads, in the order they lie in a blob."""
    if node.target is torch.ops.dsv4.moe_ffn.default:
        operands = node.args[3:7]
    elif node.target is torch.ops.dsv4.placed_experts.default:
        operands = node.args[5:6]
    else:
        return []
    return [arg for arg in operands if isinstance(arg, Node)]
