"""Typed entries of `node.meta`: what later stages need to know and the graph itself does not say.

One key a type, read and written only through the functions here.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import GraphModule, Node

from dsv4c.checkpoint.config import ModelConfig
from dsv4c.checkpoint.formats import Encoding
from dsv4c.checkpoint.quantization import Quantization
from dsv4c.step_abi import Input, LaunchFlag, StateKind

Numerics = Literal["exact", "reference"]
Part = Literal["values", "codes", "scales", "packed"]


@dataclass(frozen=True)
class Parameter:
    """A weight: the checkpoint tensors it is made of, and which part of them.

    `sources` are official names, concatenated along the rows; with `experts` > 0 they hold an `{expert}` field and the
    parameter stacks that many. `part` is "values" while the graph computes with decoded numbers, "codes" and "scales"
    once `quantize_weights` has decided the storage. "packed" is a stack of records, one an expert, of its sources w1,
    w3 and w2 with their scales (`checkpoint/expert_packing.py`). `encoding` is that of the checkpoint, `quantization`
    what the build makes of it. `block` is the scale block of the codes in the engine; the rows of it may be fewer than
    in the source, where a merged matrix needs scales that do not straddle two sources.
    """

    sources: tuple[str, ...]
    rows: tuple[int, ...]
    encoding: Encoding
    block: tuple[int, int] | None
    float_scales: bool = False  # float32 scales instead of exponents
    part: Part = "values"
    experts: int = 0
    quantization: Quantization | None = None

    @property
    def stored_as(self) -> Encoding:
        """The encoding in the engine."""
        return self.quantization.encoding if self.quantization else self.encoding

    def source_names(self, expert: int | None = None) -> list[str]:
        """The checkpoint tensors, of one expert where the parameter is a stack."""
        if not self.experts:
            return list(self.sources)
        chosen = range(self.experts) if expert is None else (expert,)
        return [name.format(expert=e) for e in chosen for name in self.sources]


@dataclass(frozen=True)
class Constant:
    """A small table the graph computes with, stored among the weights: rotary frequencies, expert topologies (int32).

    `layer` where it is that of one layer; others lie once, with the first layer that uses them.
    """

    values: tuple[float, ...] | tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layer: int | None = None

    @property
    def stored_as(self) -> Encoding:
        return Encoding.F32 if self.dtype == torch.float32 else Encoding.INT32


@dataclass(frozen=True)
class StatePlane:
    """A state tensor: `rows` rows a slot or a block, each standing for `ratio` positions, or those of a session."""

    kind: StateKind
    rows: int
    ratio: int


@dataclass(frozen=True)
class GraphInfo:
    """What a graph was built from; in `gm.meta`. `symbols` maps sympy names of sizes to T, R, S, B, M."""

    config: ModelConfig
    numerics: Numerics
    symbols: dict[str, str]
    block_tokens: int


def set_info(gm: GraphModule, info: GraphInfo) -> None:
    gm.meta["dsv4_info"] = info


def get_info(gm: GraphModule) -> GraphInfo:
    info = gm.meta["dsv4_info"]
    assert isinstance(info, GraphInfo)
    return info


Placeholder = Parameter | Constant | StatePlane | Input


def set_placeholder(node: Node, what: Placeholder) -> None:
    """Say what a placeholder stands for."""
    node.meta["dsv4_placeholder"] = what


def get_placeholder(node: Node) -> Placeholder:
    what = node.meta["dsv4_placeholder"]
    assert isinstance(what, Parameter | Constant | StatePlane | Input)
    return what


def get_parameter(node: Node) -> Parameter | None:
    """The weight a node is, None for any other node."""
    what = node.meta.get("dsv4_placeholder")
    return what if isinstance(what, Parameter) else None


def set_layer(node: Node, layer: int | None) -> None:
    node.meta["dsv4_layer"] = layer


def get_layer(node: Node) -> int | None:
    layer = node.meta.get("dsv4_layer")
    assert layer is None or isinstance(layer, int)
    return layer


def set_flags(node: Node, flags: LaunchFlag) -> None:
    """When the launch of this node runs; unset: always."""
    node.meta["dsv4_flags"] = flags


def get_flags(node: Node) -> LaunchFlag:
    return LaunchFlag(node.meta.get("dsv4_flags", 0))


def value_of(node: Node) -> torch.Tensor:
    """The fake tensor of a node with one tensor result."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), node
    return value


@dataclass(frozen=True)
class PlannedPlane:
    """One state plane as it lies in memory: rows of `row_bytes`, `rows` of them a slot, a block or a session."""

    name: str
    kind: StateKind
    layer: int | None
    rows: int
    ratio: int
    row_bytes: int
    dtype: torch.dtype

    @property
    def unit_bytes(self) -> int:
        """Bytes a slot, a block or a session takes in this plane."""
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class StateLayout:
    """The state planes in the order of the graph; what `plan_state` decided."""

    planes: tuple[PlannedPlane, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes a slot takes whatever its length."""
        return sum(plane.unit_bytes for plane in self.planes if plane.kind is StateKind.SLOT)

    @property
    def block_bytes(self) -> int:
        """Bytes a block of `GraphInfo.block_tokens` positions takes."""
        return sum(plane.unit_bytes for plane in self.planes if plane.kind is StateKind.BLOCK)

    @property
    def session_bytes(self) -> int:
        """Bytes a session takes whatever its slots: the counts of the routing."""
        return sum(plane.unit_bytes for plane in self.planes if plane.kind is StateKind.ROUTING_COUNTS)


def note_unplaced_experts(gm: GraphModule, reason: str) -> None:
    """Some layers' routed experts keep to the kernels of several launches."""
    gm.meta["dsv4_unplaced_experts"] = reason


def unplaced_experts(gm: GraphModule) -> str | None:
    """Why, where there are any."""
    reason = gm.meta.get("dsv4_unplaced_experts")
    assert reason is None or isinstance(reason, str)
    return reason


def set_state_layout(gm: GraphModule, layout: StateLayout) -> None:
    gm.meta["dsv4_state_layout"] = layout


def get_state_layout(gm: GraphModule) -> StateLayout:
    layout = gm.meta["dsv4_state_layout"]
    assert isinstance(layout, StateLayout)
    return layout
