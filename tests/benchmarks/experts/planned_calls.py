"""The calls that are compiled: of `placed_experts`, and of the operators it replaces, as the selectors choose them."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from dsv4c.graph.topology import ExpertShapes, TopologyKind, group_count, place
from dsv4c.kernels.registry import SELECTORS
from dsv4c.kernels.select.placed_experts import STREAM_ROWS, select_placed_experts
from dsv4c.kernels.select.selection import Selection, Selector
from dsv4c.kernels.sources import KERNEL_FOLDER, KernelSources
from dsv4c.plan.execution_plan import Arg, KernelCall, KernelVariant, Launch, TensorRef
from dsv4c.step_abi import Dim, DType, LaunchFlag, Space
from dsv4c.target import TARGETS
from tests.benchmarks.experts.manifest import STREAMED, Argument, Operand, Shape, Variant
from tests.benchmarks.experts.records import record_bytes

TARGET = TARGETS["h100"]
SHAPES = (
    Shape("flash", 4096, 2048, 256, 6, 1.5, 10.0),
    Shape("pro", 7168, 3072, 384, 6, 2.5, 10.0),
)
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
HASH_BUCKETS = (8, 1024)
VOCABULARY = 4096  # rows of the table of hash routing
_FLOOR_MACRO = "STREAM_ONLY"
_DTYPES = {"fp4": DType.F4E2M1X2, "fp8": DType.F8E4M3}
# Operands are told apart by their addresses alone: each has this much of its space.
_SPACING = 1 << 40
_OF_A_STEP = ("x", "logits", "ids", "weights", "out")
_LISTS = ("xq", "xs", "pair_weights", "list", "places", "heads")
# After the lists, the topology and the weights.
_EXPERTS_ARGUMENTS = {
    "experts_stream": ("h", "parts", "counters", "out"),
    "experts_grouped": ("h", "h_scales", "parts", "counters", "out"),
    "experts_prefill": ("packed", "h", "parts", "counters", "out"),
}

Change = dict[str, int | float | str]


@dataclass(frozen=True)
class Choice:
    """What is compiled."""

    shapes: Sequence[str]
    weights: Sequence[str]
    topologies: Sequence[TopologyKind]
    buckets: Sequence[int]
    sm_count: int
    group_sms: int
    floor: bool
    several: bool  # also the launches that `placed_experts` replaces
    changes: Sequence[tuple[str, Change]]  # label, and macros of the experts' call; also `shared_bytes` and `block`
    stream_rows: int = 0  # buckets of up to so many rows also with the kernel that streams the weights


@dataclass(frozen=True)
class Planned:
    variant: Variant  # without its calls
    calls: list[KernelCall]
    arguments: list[tuple[Argument, ...]]  # of every call


def plan(choice: Choice) -> Iterator[Planned]:
    for shape in SHAPES:
        if shape.name not in choice.shapes:
            continue
        for weights in choice.weights:
            for bucket in choice.buckets:
                for topology in choice.topologies:
                    yield from _placed(choice, shape, weights, topology, "topk", bucket)
                if bucket in HASH_BUCKETS:
                    yield from _placed(choice, shape, weights, choice.topologies[0], "hash", bucket)
                if choice.several:
                    yield _several(choice, shape, weights, bucket)


def _placed(
    choice: Choice, shape: Shape, weights: str, topology: TopologyKind, routing: str, bucket: int
) -> Iterator[Planned]:
    stride = -(-record_bytes(shape, weights) // 4096) * 4096
    operands = [
        Operand("x", "BF16", (bucket, shape.hidden)),
        Operand("logits", "F32", (bucket, shape.experts)),
        Operand("experts", _DTYPES[weights].name, (shape.experts, stride)),
        Operand("out", "F32", (bucket, shape.hidden)),
    ]
    if routing == "topk":
        operands.append(Operand("bias", "F32", (shape.experts,)))
    else:
        operands.append(Operand("table", "I64", (VOCABULARY, shape.choices)))
        operands.append(Operand("token_ids", "I32", (bucket,)))
    if topology != "striped":
        operands.append(_topology(choice, shape, topology))
    refs = _place(operands)
    names = ("x", "logits", "bias", "table", "token_ids", "experts", "topology")
    scalars = (shape.inner, shape.choices, shape.scale, shape.limit, choice.group_sms)
    variant = Variant(
        name=f"{shape.name}-{weights}-{topology}-{routing}-{bucket}",
        shape=shape.name,
        weights=weights,
        topology=topology,
        routing=routing,
        bucket=bucket,
        kernel="",
        kind="product",
        record_bytes=stride,
        groups=group_count(topology, shape.experts, choice.sm_count, choice.group_sms),
        sm_count=choice.sm_count,
        scratch_bytes=0,
        operands=tuple(operands),
        calls=(),
    )

    def planned(variant: Variant, stream_rows: int) -> Planned:
        selection = Selection(TARGET, choice.sm_count, bucket, _SPACING * len(operands))
        selector = partial(select_placed_experts, stream_rows=stream_rows)
        calls = _select("placed_experts", selection, (*map(refs.get, names), *scalars), refs["out"], selector=selector)
        variant = replace(variant, kernel=calls[-1].variant.entry, scratch_bytes=selection.scratch_bytes)
        return Planned(variant, calls, _name_arguments(calls, refs, selection.scratch_start))

    several = [planned(variant, STREAM_ROWS)]
    if routing == "topk" and bucket <= choice.stream_rows:
        streamed = planned(replace(variant, name=f"{variant.name}-{STREAMED}", kind=STREAMED), choice.stream_rows)
        # It may be the same, or memory may not suffice.
        if streamed.variant.kernel != several[0].variant.kernel:
            several.append(streamed)
    yield from several
    if routing == "topk":
        for one in several:
            if choice.floor and _has_macro(one.calls[-1].variant, _FLOOR_MACRO):
                yield _changed(one, "floor", {_FLOOR_MACRO: 1})
            for label, change in choice.changes:
                yield _changed(one, label, change)


def _several(choice: Choice, shape: Shape, weights: str, bucket: int) -> Planned:
    """route_topk and moe_ffn, on weights as a checkpoint has them."""
    fp4 = weights == "fp4"
    block_rows, block_cols = (1, 32) if fp4 else (128, 128)

    def matrix(name: str, rows: int, columns: int) -> list[Operand]:
        scales = (shape.experts, -(-rows // block_rows), columns // block_cols)
        return [
            Operand(name, _DTYPES[weights].name, (shape.experts, rows, columns // (2 if fp4 else 1))),
            Operand(f"{name}_scales", "F8E8M0", scales),
        ]

    operands = [
        Operand("x", "BF16", (bucket, shape.hidden)),
        Operand("logits", "F32", (bucket, shape.experts)),
        Operand("bias", "F32", (shape.experts,)),
        Operand("ids", "I32", (bucket, shape.choices)),
        Operand("weights", "F32", (bucket, shape.choices)),
        *matrix("w13", 2 * shape.inner, shape.hidden),
        *matrix("w2", shape.hidden, shape.inner),
        Operand("out", "F32", (bucket, shape.hidden)),
    ]
    refs = _place(operands)
    selection = Selection(TARGET, choice.sm_count, bucket, _SPACING * len(operands))
    router = (refs["logits"], refs["bias"], shape.choices, shape.scale)
    names = ("x", "ids", "weights", "w13", "w13_scales", "w2", "w2_scales")
    experts = (*(refs[name] for name in names), block_rows, block_cols, shape.limit, 128)
    calls = [
        *_select("route_topk", selection, router, refs["ids"], refs["weights"]),
        *_select("moe_ffn", selection, experts, refs["out"]),
    ]
    variant = Variant(
        name=f"{shape.name}-{weights}-several-topk-{bucket}",
        shape=shape.name,
        weights=weights,
        topology="striped",
        routing="topk",
        bucket=bucket,
        kernel="moe_ffn",
        kind="several",
        record_bytes=-(-record_bytes(shape, weights) // 4096) * 4096,
        groups=1,
        sm_count=choice.sm_count,
        scratch_bytes=selection.scratch_bytes,
        operands=tuple(operands),
        calls=(),
    )
    return Planned(variant, calls, _name_arguments(calls, refs, selection.scratch_start))


def _select(
    name: str, selection: Selection, args: tuple[Arg, ...], *outputs: TensorRef, selector: Selector | None = None
) -> list[KernelCall]:
    launch = Launch(name, name, None, LaunchFlag(0), args, outputs, 0, 0)
    return (selector or SELECTORS[TARGET.arch][name])(launch, selection)


def _changed(planned: Planned, label: str, change: Change) -> Planned:
    *before, call = planned.calls
    macros = dict(call.variant.constants)
    fields = {}
    for name, value in change.items():
        if name in ("shared_bytes", "block"):
            fields[name] = int(value)
        else:
            macros[name] = value
    call = replace(call, variant=replace(call.variant, constants=tuple(sorted(macros.items()))), **fields)
    kind = label if planned.variant.kind == "product" else f"{planned.variant.kind}-{label}"
    variant = replace(planned.variant, name=f"{planned.variant.name}-{label}", kind=kind)
    return Planned(variant, [*before, call], planned.arguments)


def _has_macro(variant: KernelVariant, name: str) -> bool:
    source = KernelSources(KERNEL_FOLDER).find("cuda", variant.source)
    return any(name in text.split() for text in source.files.values())


def _topology(choice: Choice, shape: Shape, kind: TopologyKind) -> Operand:
    """A row for every product of the target, one of them where this is none of these."""
    shapes = ExpertShapes(shape.experts, shape.hidden, shape.inner)
    rng = random.Random(3)
    counts = [int(1000 / (1 + rng.randrange(shape.experts)) ** 0.5) for _ in range(shape.experts)]
    given = counts if kind == "traced" else None
    sm_counts = TARGET.sm_counts if choice.sm_count in TARGET.sm_counts else (choice.sm_count,)
    rows = [place(shapes, sm_count, kind, choice.group_sms, given).table() for sm_count in sm_counts]
    width = max(map(len, rows))
    values = tuple(value for row in rows for value in (*row, *(0,) * (width - len(row))))
    return Operand("topology", "I32", (len(rows), width), values)


def _place(operands: Sequence[Operand]) -> dict[str, TensorRef]:
    """Each at an address of its own."""
    refs = {}
    for number, operand in enumerate(operands):
        of_step = operand.name in _OF_A_STEP
        space = Space.INPUT if operand.name == "token_ids" else Space.ARENA if of_step else Space.WEIGHT
        strides = tuple(prod(operand.sizes[i + 1 :]) for i in range(len(operand.sizes)))
        dims = (Dim.TOKENS if of_step else Dim.FIXED, *(Dim.FIXED,) * (len(operand.sizes) - 1))
        offset = 0 if space is Space.INPUT else number * _SPACING
        refs[operand.name] = TensorRef(space, DType[operand.dtype], offset, operand.sizes, strides, dims)
    return refs


def _name_arguments(
    calls: Sequence[KernelCall], refs: dict[str, TensorRef], scratch_start: int
) -> list[tuple[Argument, ...]]:
    """Scratch by its place in the experts' call, where that is one of one launch."""
    known = _scratch_names(calls[-1])

    def argument(arg: TensorRef, position: int) -> Argument:
        size = prod(arg.sizes) * arg.dtype.size_bytes
        if arg.space is Space.ARENA and arg.offset >= scratch_start:
            name = known.get(arg.offset, f"scratch {position}")
            return Argument(name, None, arg.dtype.name, arg.offset - scratch_start, size)
        name, ref = next(
            (name, ref)
            for name, ref in refs.items()
            if ref.space is arg.space and ref.offset <= arg.offset < ref.offset + _SPACING
        )
        return Argument(name, name, arg.dtype.name, arg.offset - ref.offset, size)

    return [tuple(argument(arg, i) for i, arg in enumerate(call.args)) for call in calls]


def _scratch_names(call: KernelCall) -> dict[int, str]:
    """By offset in the arena."""
    last = _EXPERTS_ARGUMENTS.get(call.variant.entry)
    if last is None:
        return {}
    between = ("topology",) * (len(call.args) - len(_LISTS) - 1 - len(last))
    names = (*_LISTS, *between, "experts", *last)
    return {arg.offset: name for arg, name in zip(call.args, names, strict=True) if arg.space is Space.ARENA}
