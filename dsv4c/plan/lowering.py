"""Graph -> ExecutionPlan: every `dsv4::` node becomes a launch, every view a tensor with strides.

One graph serves all buckets: lowering puts the bucket's number of rows in place of the symbol T (and R), plans the
arena for it and leaves the symbols of the session (S, B, M) open.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsv4c.errors import PlanError
from dsv4c.graph.annotations import (
    Constant,
    Parameter,
    StatePlane,
    get_flags,
    get_info,
    get_layer,
    get_placeholder,
    get_state_layout,
)
from dsv4c.graph.emit import fake_result
from dsv4c.graph.printer import target_name
from dsv4c.plan.cost import launch_cost
from dsv4c.plan.execution_plan import DENSE, DTYPES, Arg, BucketPlan, EntryPoint, ExecutionPlan, Launch, TensorRef
from dsv4c.plan.memory import Lifetime, plan_arena
from dsv4c.plan.weight_layout import WeightPlace, layout_weights
from dsv4c.step_abi import BucketKind, Dim, Input, Output, Space

aten = torch.ops.aten

VIEWS = (aten.reshape.default, aten.slice.Tensor, aten.unsqueeze.default, aten.expand.default)
_DIMS = {"T": Dim.TOKENS, "R": Dim.LOGITS, "S": Dim.SLOTS, "B": Dim.BLOCKS, "M": Dim.TABLE}


@dataclass(frozen=True)
class _Home:
    """Where the bytes of a tensor are: a placeholder or one result of a launch."""

    node: Node
    result: int = 0


@dataclass(frozen=True)
class _View:
    home: _Home
    value: torch.Tensor  # fake: sizes, strides and offset within the home


def lower_graph(
    gm: GraphModule, decode_buckets: Sequence[int], mixed_buckets: Sequence[int], rollback_rows: int
) -> ExecutionPlan:
    """The plan of a graph that went through the whole pipeline.

    Raises PlanError where a node has no kernel or a view cannot be expressed with strides.
    """
    weights, places = layout_weights(gm)
    lowering = _Lowering(gm, places)
    buckets = [lowering.bucket(BucketKind.DECODE, tokens) for tokens in decode_buckets]
    buckets += [lowering.bucket(BucketKind.MIXED, tokens) for tokens in mixed_buckets]
    info = get_info(gm)
    config = info.config
    return ExecutionPlan(
        entry_points=(EntryPoint("main", tuple(buckets)),),
        weights=weights,
        state=get_state_layout(gm),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layer_count=config.num_hidden_layers,
        max_context=config.max_position_embeddings,
        block_tokens=info.block_tokens,
        rollback_rows=rollback_rows,
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
    )


class _Lowering:
    def __init__(self, gm: GraphModule, places: dict[str, WeightPlace]) -> None:
        self._places = places
        self._symbols = get_info(gm).symbols
        self._planes = {plane.name: index for index, plane in enumerate(get_state_layout(gm).planes)}
        self._views: dict[Node, _View] = {}
        self._launches: list[Node] = []
        self._outputs: dict[_Home, Output] = {}
        for node in gm.graph.nodes:
            self._visit(node)

    def _visit(self, node: Node) -> None:
        if node.op == "placeholder":
            self._views[node] = _View(_Home(node), node.meta["val"])
        elif node.op == "output":
            for which, result in zip(Output, node.args[0], strict=True):  # type: ignore[arg-type]
                self._outputs[self._views[result].home] = which
        elif node.target is operator.getitem:
            launch, result = node.args
            self._views[node] = _View(_Home(launch, result), node.meta["val"])  # type: ignore[arg-type]
        elif node.target in VIEWS:
            self._views[node] = self._view(node)
        elif getattr(node.target, "namespace", None) == "dsv4":
            self._launches.append(node)
            if isinstance(node.meta["val"], torch.Tensor):
                self._views[node] = _View(_Home(node), node.meta["val"])
        else:
            raise PlanError(
                f"no kernel for %{node.name} = {target_name(node.target)}(...)",
                hint="a pass must turn it into a dsv4 operator; see dsv4c/passes/README.md",
            )

    def _view(self, node: Node) -> _View:
        # Passes may have changed the strides of the source since the node was made.
        source = self._views[node.args[0]]  # type: ignore[index]
        value = fake_result(node.target, (source.value, *node.args[1:]), node.kwargs)
        if value.untyped_storage()._cdata != source.value.untyped_storage()._cdata:
            raise PlanError(f"%{node.name} ({target_name(node.target)}) needs a copy: its source is not contiguous")
        return _View(source.home, value)

    def bucket(self, kind: BucketKind, tokens: int) -> BucketPlan:
        arena = plan_arena(self._lifetimes(tokens))
        launches = tuple(self._launch(node, tokens, arena.offsets) for node in self._launches)
        return BucketPlan(kind, tokens, launches, arena.size_bytes, arena.unshared_bytes)

    def _lifetimes(self, tokens: int) -> list[Lifetime]:
        first: dict[_Home, int] = {}
        last: dict[_Home, int] = {}
        size: dict[_Home, int] = {}
        for index, node in enumerate(self._launches):
            for arg in node.all_input_nodes:
                home = self._views[arg].home
                if home in first:
                    last[home] = index
            for result, value in enumerate(_results(node)):
                home = _Home(node, result)
                if home not in self._outputs:
                    first[home] = last[home] = index
                    size[home] = self._bytes(value, tokens)
        return [Lifetime(_buffer(home), size[home], first[home], last[home]) for home in first]

    def _bytes(self, value: torch.Tensor, tokens: int) -> int:
        count = value.element_size()
        for size in value.shape:
            count *= self._size(size, tokens)[1]
        return count

    def _size(self, size: Any, tokens: int) -> tuple[Dim, int]:
        if isinstance(size, int):
            return Dim.FIXED, size
        name = self._symbols.get(str(size))
        if name is None:
            raise PlanError(f"a kernel would see a size of {size}; sizes are constants or one of T, R, S, B, M")
        dim = _DIMS[name]
        return dim, tokens if dim in (Dim.TOKENS, Dim.LOGITS) else 0

    def _launch(self, node: Node, tokens: int, offsets: dict[str, int]) -> Launch:
        args = tuple(self._arg(arg, tokens, offsets) for arg in node.args)
        outputs = tuple(
            self._tensor(_View(_Home(node, i), value), tokens, offsets) for i, value in enumerate(_results(node))
        )
        kernel = target_name(node.target).removeprefix("dsv4.")
        moved, flops = launch_cost(kernel, args, outputs)
        return Launch(kernel, node.name, get_layer(node), get_flags(node), args, outputs, moved, flops)

    def _arg(self, arg: Any, tokens: int, offsets: dict[str, int]) -> Arg:
        if isinstance(arg, Node):
            return self._tensor(self._views[arg], tokens, offsets)
        if isinstance(arg, torch.dtype):
            return int(DTYPES[arg])
        assert arg is None or isinstance(arg, int | float), arg
        return int(arg) if isinstance(arg, bool) else arg

    def _tensor(self, view: _View, tokens: int, offsets: dict[str, int]) -> TensorRef:
        dims, sizes = zip(*(self._size(size, tokens) for size in view.value.shape), strict=True)
        strides = [stride if isinstance(stride, int) else DENSE for stride in view.value.stride()]
        space, base, index = self._place(view.home, offsets)
        if space is Space.WEIGHT and (stride := self._places[view.home.node.name].expert_stride):
            strides[0] = stride // view.value.element_size()
        offset = base + int(view.value.storage_offset()) * view.value.element_size()
        return TensorRef(space, DTYPES[view.value.dtype], offset, sizes, tuple(strides), dims, index)

    def _place(self, home: _Home, offsets: dict[str, int]) -> tuple[Space, int, int]:
        if home.node.op != "placeholder":
            if home in self._outputs:
                return Space.OUTPUT, 0, int(self._outputs[home])
            return Space.ARENA, offsets[_buffer(home)], 0
        what = get_placeholder(home.node)
        if isinstance(what, Input):
            return Space.INPUT, 0, int(what)
        if isinstance(what, StatePlane):
            return Space.STATE, 0, self._planes[home.node.name]
        assert isinstance(what, Parameter | Constant)
        return Space.WEIGHT, self._places[home.node.name].offset, 0


def _buffer(home: _Home) -> str:
    return f"{home.node.name}.{home.result}"


def _results(node: Node) -> tuple[torch.Tensor, ...]:
    value = node.meta["val"]
    if value is None:
        return ()
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)
