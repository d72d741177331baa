"""The plan of a whole model from one layer of each kind.

Building the graph of 61 layers takes a minute; most layers are alike. The model that is really built, passed and
lowered here has one layer for each combination of kind, ratio, routing and storage, and what comes out is counted as
often as the layer occurs. The first layer stands for itself: its streams are a broadcast of the embedding, which moves
fewer bytes. A test compares the result with that of the whole model.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dsv4c.checkpoint.checkpoint import WeightInfo
from dsv4c.checkpoint.config import ModelConfig
from dsv4c.checkpoint.formats import Encoding
from dsv4c.checkpoint.tensor_classes import EXPERT, TensorClass, tensor_class
from dsv4c.engine import format
from dsv4c.graph.annotations import Constant, PlannedPlane, StateLayout
from dsv4c.graph.builder import build_graph
from dsv4c.kernels.assign import assign_kernels, plan_variants
from dsv4c.kernels.registry import KERNELS
from dsv4c.passes.pass_manager import PassContext, run_passes
from dsv4c.passes.pipeline import build_pipeline
from dsv4c.plan.execution_plan import Arg, BucketPlan, ExecutionPlan, Extent, TensorRef
from dsv4c.plan.lowering import lower_graph
from dsv4c.plan.weight_layout import ALIGNMENT, EXPERT_ALIGNMENT
from dsv4c.recipe import Recipe
from dsv4c.step_abi import Space, StateKind

LAYER_NAME = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT_NUMBER = re.compile(r"experts\.\d+\.")


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def group_layers(config: ModelConfig, weights: Mapping[str, WeightInfo]) -> list[list[int]]:
    """The layers that are alike, in the order in which each kind occurs first."""
    stored: list[set[object]] = [set() for _ in config.layers]
    for name, info in weights.items():
        if match := LAYER_NAME.fullmatch(name):
            leaf = _EXPERT_NUMBER.sub("experts.", match[2])
            scale_dtype = info.scales.dtype if info.scales else None
            stored[int(match[1])].add((leaf, info.encoding, info.block, scale_dtype))
    groups: dict[object, list[int]] = {}
    for index, layer in enumerate(config.layers):
        groups.setdefault((index == 0, layer, frozenset(stored[index])), []).append(index)
    return list(groups.values())


@dataclass(frozen=True)
class BucketTotal:
    """One bucket of the whole model; bytes and FLOPs as in the engine's manifest (dsv4c/plan/cost.py)."""

    kind: str
    tokens: int
    launches: int
    calls: int  # of kernels; an operator may take several on a target that compiles them
    arena_bytes: int
    bytes_moved: int
    flops: int


@dataclass(frozen=True)
class ClassTotal:
    """Weights of one class and encoding as they lie in the engine; scales count as bytes, not as tensors."""

    kind: TensorClass | None  # None: constants such as rotary frequencies
    encoding: Encoding
    tensors: int
    size_bytes: int


@dataclass(frozen=True)
class ModelPlan:
    """`reduced` is the plan with one layer a kind; layer i of it occurs `counts[i]` times, as `groups[i]` lists."""

    config: ModelConfig
    recipe: Recipe
    reduced: ExecutionPlan
    groups: tuple[tuple[int, ...], ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(map(len, self.groups))

    def count(self, layer: int | None) -> int:
        """How often a launch, plane or extent of this reduced layer occurs in the model."""
        return 1 if layer is None else self.counts[layer]

    @cached_property
    def weight_bytes(self) -> int:
        """Size of the WEIGHTS section, to the byte."""
        return layout_bytes(self.reduced.weights.extents, self.groups)

    def class_totals(self) -> list[ClassTotal]:
        tensors: Counter[tuple[TensorClass | None, Encoding]] = Counter()
        sizes: Counter[tuple[TensorClass | None, Encoding]] = Counter()
        for extent in self.reduced.weights.extents:
            kind = None if isinstance(extent.what, Constant) else tensor_class(extent.source)
            key = kind, extent.what.stored_as
            times = self.count(extent_layer(extent))
            sizes[key] += times * extent.size_bytes
            tensors[key] += times * extent.tensors
        order = {kind: index for index, kind in enumerate([*TensorClass, None])}
        return [
            ClassTotal(kind, encoding, tensors[kind, encoding], sizes[kind, encoding])
            for kind, encoding in sorted(sizes, key=lambda key: (order[key[0]], key[1].value))
        ]

    @property
    def state(self) -> StateLayout:
        return self.reduced.state

    def state_bytes(self, slots: int, context: int) -> int:
        """What a session allocates."""
        blocks = slots * -(-context // self.reduced.block_tokens)
        return sum(self.count(plane.layer) * plane_bytes(plane, slots, blocks) for plane in self.state.planes)

    @cached_property
    def slot_bytes(self) -> int:
        """State of a slot whatever its length: windows and open groups, with rows for rollback."""
        return self._units(StateKind.SLOT)

    @cached_property
    def block_bytes(self) -> int:
        """State of a block of `block_tokens` positions."""
        return self._units(StateKind.BLOCK)

    @cached_property
    def session_bytes(self) -> int:
        """State of a session whatever its slots: the counts of the routing, where the recipe asks for them."""
        return self._units(StateKind.ROUTING_COUNTS)

    @cached_property
    def rollback_bytes(self) -> int:
        """The part of `slot_bytes` that only serves `truncate`: every such plane has that many rows more."""
        rows = self.reduced.rollback_rows
        planes = [plane for plane in self.state.planes if plane.kind is StateKind.SLOT]
        return sum(self.count(plane.layer) * rows * plane.row_bytes for plane in planes)

    def _units(self, kind: StateKind) -> int:
        return sum(self.count(plane.layer) * plane.unit_bytes for plane in self.state.planes if plane.kind is kind)

    @cached_property
    def buckets(self) -> list[BucketTotal]:
        return [self._bucket(bucket) for bucket in self.reduced.buckets]

    def _bucket(self, bucket: BucketPlan) -> BucketTotal:
        return BucketTotal(
            kind=bucket.kind.name.lower(),
            tokens=bucket.tokens,
            launches=sum(self.count(launch.layer) for launch in bucket.launches),
            calls=sum(self.count(launch.layer) * max(1, len(launch.calls)) for launch in bucket.launches),
            arena_bytes=bucket.arena_bytes,
            bytes_moved=sum(self.count(launch.layer) * launch.bytes_moved for launch in bucket.launches),
            flops=sum(self.count(launch.layer) * launch.flops for launch in bucket.launches),
        )

    @cached_property
    def arena_bytes(self) -> int:
        """The arena of the largest bucket, which is what a session allocates."""
        return max(bucket.arena_bytes for bucket in self.buckets)

    @cached_property
    def plan_section_bytes(self) -> int:
        """About the size of the PLAN section: records are counted, names and shared tensors are estimated."""
        tables = max(1, len(self.recipe.target.sm_counts))  # the same launches for every product
        launches = args = 0
        # Weights and state are a layer's own; the tensors of the arena mostly lie where those of its like do.
        tensors: dict[TensorRef, int] = {}
        names: dict[str, int] = {}
        for launch in (launch for bucket in self.reduced.buckets for launch in bucket.launches):
            count = self.count(launch.layer)
            names[launch.name] = count * (len(launch.name) + 1)
            whole: list[Sequence[Arg]] = [(*launch.args, *launch.outputs)]
            for operands in [call.args for call in launch.calls] or whole:
                launches += count
                args += count * len(operands)
                for ref in operands:
                    if isinstance(ref, TensorRef):
                        tensors[ref] = count if ref.space in (Space.WEIGHT, Space.STATE) else 1
        planes = sum(self.count(plane.layer) for plane in self.state.planes)
        return (
            format.PlanHeader.LAYOUT.size
            + format.Bucket.LAYOUT.size * len(self.buckets) * tables
            + format.Launch.LAYOUT.size * launches * tables
            + format.Arg.LAYOUT.size * args * tables
            + format.Tensor.LAYOUT.size * sum(tensors.values())
            + format.State.LAYOUT.size * planes
            + format.Kernel.LAYOUT.size * (len(plan_variants(self.reduced)) or len(self.reduced.kernels))
            + sum(names.values())
        )

    @cached_property
    def extents_by_offset(self) -> dict[int, Extent]:
        return {extent.offset: extent for extent in self.reduced.weights.extents}


def plane_bytes(plane: PlannedPlane, slots: int, blocks: int) -> int:
    """A state plane as a session allocates it; every plane begins on a 64-byte boundary."""
    return _align(plane.unit_bytes * plane.kind.units(slots, blocks), ALIGNMENT)


def _is_shared(extent: Extent) -> bool:
    return isinstance(extent.what, Constant) and extent.what.layer is None


def extent_layer(extent: Extent) -> int | None:
    """The layer of a weight; None outside the layers."""
    if isinstance(extent.what, Constant):
        return extent.what.layer
    match = LAYER_NAME.fullmatch(extent.source)
    return int(match[1]) if match else None


def layout_bytes(extents: Sequence[Extent], groups: Sequence[Sequence[int]]) -> int:
    """Size of the WEIGHTS section when the layers of a reduced model are laid out as often as they occur.

    The same rules as `plan/weight_layout.py`: weights on 64 bytes, experts on pages. A constant that is no layer's own
    lies with the first one that uses it and nowhere else.
    """
    head: list[Extent] = []
    by_layer: list[list[Extent]] = [[] for _ in groups]
    tail: list[Extent] = []
    current: int | None = None
    for extent in extents:
        layer = extent_layer(extent)
        if _is_shared(extent):
            layer = current
        if layer is not None:
            current = layer
            by_layer[layer].append(extent)
        else:
            (head if current is None else tail).append(extent)
    order = {layer: number for number, layers in enumerate(groups) for layer in layers}
    offset = _laid_out(0, head, True)
    seen: set[int] = set()
    for layer in sorted(order):
        number = order[layer]
        offset = _laid_out(offset, by_layer[number], number not in seen)
        seen.add(number)
    return _align(_laid_out(offset, tail, True), EXPERT_ALIGNMENT)


def _laid_out(offset: int, extents: Sequence[Extent], constants: bool) -> int:
    """The end of these extents laid out from `offset` on."""
    end: int | None = None  # of the extent before, where it lies in the reduced model
    was_expert = False
    for extent in extents:
        if _is_shared(extent) and not constants:
            end = None
            continue
        expert = EXPERT.fullmatch(extent.source) is not None
        if expert != was_expert:
            offset = _align(offset, EXPERT_ALIGNMENT)
        elif expert:
            # To the next matrix of an expert, or to the page of the next expert: always the same.
            assert end is not None
            offset += extent.offset - end
        elif extent.offset != end:
            offset = _align(offset, ALIGNMENT)
        offset += extent.size_bytes
        end, was_expert = extent.offset + extent.size_bytes, expert
    return _align(offset, EXPERT_ALIGNMENT) if was_expert else offset


def plan_model(config: ModelConfig, weights: Mapping[str, WeightInfo], recipe: Recipe) -> ModelPlan:
    """The plan of a model by the same graph, passes and lowering as a build. Raises what they raise."""
    # The whole model: the reduced one has fewer layers.
    recipe.require_model(config.num_hidden_layers, config.n_routed_experts)
    groups = group_layers(config, weights)
    reduced = replace(config, num_hidden_layers=len(groups), layers=tuple(config.layers[group[0]] for group in groups))
    numbers = {group[0]: number for number, group in enumerate(groups)}
    kept: dict[str, WeightInfo] = {}
    for name, info in weights.items():
        match = LAYER_NAME.fullmatch(name)
        if match is None:
            kept[name] = info
        elif int(match[1]) in numbers:
            kept[f"layers.{numbers[int(match[1])]}.{match[2]}"] = info
    graph = build_graph(reduced, kept, recipe.numerics, recipe.rollback_rows)
    graph = run_passes(graph, build_pipeline(), PassContext(recipe.target, recipe))
    plan = lower_graph(graph, recipe.decode_buckets, recipe.mixed_buckets, recipe.rollback_rows)
    if recipe.target.arch in KERNELS:
        # One product is enough: they differ in how a few kernels split their work.
        plan = assign_kernels(plan, replace(recipe.target, sm_counts=recipe.target.sm_counts[:1]))
    return ModelPlan(config, recipe, plan, tuple(map(tuple, groups)))
