"""What the layer writers share: the step's inputs, and placeholders for weights, constants and state."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from dsv4c.checkpoint.checkpoint import WeightInfo
from dsv4c.checkpoint.config import ModelConfig
from dsv4c.checkpoint.formats import Encoding
from dsv4c.errors import GraphError
from dsv4c.graph.annotations import Constant, Numerics, Parameter, Placeholder, StatePlane, set_layer, set_placeholder
from dsv4c.graph.emit import Emitter
from dsv4c.graph.parameters import unstraddled_block
from dsv4c.graph.rotary import layer_frequencies
from dsv4c.step_abi import LaunchFlag, StateKind

aten, dsv4 = torch.ops.aten, torch.ops.dsv4


@dataclass(frozen=True)
class StepInputs:
    """The placeholders of the step's inputs; see `step_abi.Input` for shapes and dtypes."""

    token_ids: Node
    slots: Node
    positions: Node
    block_table: Node
    logits_rows: Node
    temperature: Node
    top_k: Node
    top_p: Node
    seed: Node
    mask: Node


class Symbols:
    """The symbolic sizes of graphs: T rows, R logit rows, S slots, B blocks, M blocks a slot. See `shared_symbols`."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        # Distinct hints above 1: torch specialises sizes 0 and 1, and equal sizes to each other.
        self.sizes = {name: self._symbol(hint) for name, hint in zip("TRSBM", (97, 89, 83, 79, 73), strict=True)}

    def _symbol(self, hint: int) -> torch.SymInt:
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        size = self.mode.from_tensor(torch.empty(hint), symbolic_context=context).shape[0]
        assert isinstance(size, torch.SymInt)
        return size

    def names(self) -> dict[str, str]:
        return {str(size.node.expr): name for name, size in self.sizes.items()}

    def fake(self, shape: tuple[int | str, ...], dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor; a string names a symbol."""
        sizes = [self.sizes[size] if isinstance(size, str) else size for size in shape]
        with self.mode:
            return torch.empty(sizes, dtype=dtype)


@cache
def shared_symbols() -> Symbols:
    """Those of all graphs of a process: what an operator makes of its operands is then found out once for all."""
    return Symbols()


class Placeholders:
    """Adds placeholders at the head of a graph, each at most once."""

    def __init__(self, graph: Graph, symbols: Symbols) -> None:
        self.graph = graph
        self.symbols = symbols
        self._last: Node | None = None
        self._known: dict[str, Node] = {}

    def add(
        self,
        name: str,
        what: Placeholder,
        shape: tuple[int | str, ...],
        dtype: torch.dtype,
        layer: int | None = None,
    ) -> Node:
        if name in self._known:
            return self._known[name]
        anchor = self.graph.inserting_after(self._last) if self._last else self.graph.inserting_before()
        with anchor:
            node = self.graph.placeholder(name)
        node.meta["val"] = self.symbols.fake(shape, dtype)
        set_placeholder(node, what)
        set_layer(node, layer)
        self._last = self._known[name] = node
        return node


@dataclass(frozen=True)
class ModelScope:
    """What is the same for every layer of one graph."""

    placeholders: Placeholders
    config: ModelConfig
    weights: Mapping[str, WeightInfo]
    numerics: Numerics
    block_tokens: int
    rollback_rows: int
    inputs: StepInputs


class LayerScope(Emitter):
    """Writes one layer into the graph of `model` (layer None: what is outside the layers)."""

    def __init__(self, model: ModelScope, layer: int | None = None, flags: LaunchFlag = LaunchFlag(0)) -> None:
        super().__init__(model.placeholders.graph, layer, flags)
        self.model = model
        self.config = model.config
        self.inputs = model.inputs

    @property
    def simulates_quantization(self) -> bool:
        """Whether the graph rounds as the model was trained to (spec 2.9)."""
        return self.model.numerics == "reference"

    @property
    def act_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.simulates_quantization else torch.float32

    def act(self, name: str, x: Node) -> Node:
        """`x` rounded to the activation dtype."""
        return self.cast(name, x, self.act_dtype)

    def _official(self, leaf: str) -> str:
        return leaf if self.layer is None else f"layers.{self.layer}.{leaf}"

    def parameter(self, leaf: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Node:
        """A weight by its official name below the layer; float32 until `quantize_weights` decides its storage."""
        return self._parameter(leaf, (self._official(leaf),), (shape[0],), shape, dtype, 0)

    def expert_parameter(self, name: str, leaves: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Node:
        """A stack [E, sum(rows), columns] over the experts; `leaves` hold an `{expert}` field."""
        sources = tuple(self._official(leaf) for leaf in leaves)
        experts = self.config.n_routed_experts
        return self._parameter(name, sources, rows, (experts, sum(rows), columns), torch.float32, experts)

    def _parameter(
        self,
        name: str,
        sources: tuple[str, ...],
        rows: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        experts: int,
    ) -> Node:
        storage = {self._storage(source.format(expert=e)) for source in sources for e in range(max(experts, 1))}
        if len(storage) != 1:
            found = ", ".join(sorted({encoding.value for encoding, _, _ in storage}))
            raise GraphError(
                f"{sources[0]} and its neighbours are stored in several formats ({found}); one matrix needs one",
                hint="convert the checkpoint so that all experts of a layer share a format",
            )
        encoding, block, float_scales = storage.pop()
        what = Parameter(sources, rows, encoding, unstraddled_block(block, rows), float_scales, "values", experts)
        path = self._official(name).removesuffix(".weight")
        return self.model.placeholders.add("p_" + path.replace(".", "_"), what, shape, dtype, self.layer)

    def _storage(self, name: str) -> tuple[Encoding, tuple[int, int] | None, bool]:
        info = self.model.weights[name]
        return info.encoding, info.block, info.scales is not None and info.scales.dtype == "F32"

    def frequencies(self, *, compressed: bool) -> Node:
        """The rotary frequencies of a layer, float32 [rotary_dim / 2]."""
        values = layer_frequencies(self.config, compressed)
        name = "c_rope_compress" if compressed else "c_rope_window"
        what = Constant(tuple(values.tolist()))
        return self.model.placeholders.add(name, what, (len(values),), torch.float32)

    def state(
        self, name: str, kind: StateKind, rows: int, ratio: int, row: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Node:
        """A state plane [S or B, rows, *row] of this layer; the activation dtype where none is given."""
        units = "S" if kind is StateKind.SLOT else "B"
        return self.model.placeholders.add(
            f"s_{self.name(name)}",
            StatePlane(kind, rows, ratio),
            (units, rows, *row),
            dtype or self.act_dtype,
            self.layer,
        )

    def linear(
        self, name: str, x: Node, leaf: str, out_features: int, in_features: int, dtype: torch.dtype | None = None
    ) -> Node:
        """x [T, I] @ weight [O, I]^T, accumulated in float32; the activation dtype where none is given."""
        weight = self.parameter(leaf, (out_features, in_features))
        out = self.call(name, aten.linear.default, self.f32(name, x), weight)
        return self.cast(name, out, dtype or self.act_dtype)

    def norm(self, name: str, x: Node, leaf: str | None, width: int) -> Node:
        """RMS norm over the last axis, in float32, rounded once."""
        weight = None if leaf is None else self.parameter(leaf, (width,))
        wide = self.f32(name, x)
        out = self.call(name, aten.rms_norm.default, wide, [width], weight, self.config.rms_norm_eps)
        return self.act(name, out)
