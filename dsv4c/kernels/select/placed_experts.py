"""Selector of `placed_experts`: the router and its lists (`cuda/experts_lists.cu`), then all experts in one launch.

Steps of few rows stream the weights (`cuda/experts_stream.cu`), larger ones multiply them by the pairs of a place in
e4m3 (`cuda/experts_grouped.cu`), the largest in f16 (`cuda/experts_prefill.cu`). That launch starts while the lists are
being made and waits for them.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from dsv4c.checkpoint.expert_packing import TILE_BYTES
from dsv4c.checkpoint.formats import Encoding
from dsv4c.errors import PlanError
from dsv4c.graph.topology import TopologyKind, group_count
from dsv4c.kernels.select.selection import (
    Selection,
    Selector,
    ceil_div,
    cuda_type,
    cuda_variant,
    float_arg,
    int_arg,
    optional_tensor,
    tensor_arg,
)
from dsv4c.plan.execution_plan import KernelCall, Launch, TensorRef
from dsv4c.step_abi import DType

# Rows that one block routes while the others round them: with more, it would be the last.
ONE_BLOCK_ROWS = 16
# Of more, every block has some: one while each can have an SM, then as many as keep two blocks on an SM.
ONE_ROW_ROWS = 128
ROW_THREADS = 256  # of a row at least; also the fewest that make lists
MOST_ROWS_THREADS = 512
PLACE_INTS = 4  # of a Place in cuda/experts_packed.cuh

# Buckets of more rows multiply by tiles. 256 would let those of up to 256 rows stream the weights too, in places of 16
# pairs: not measured yet, `--stream-rows` of tests/benchmarks/experts compares both.
STREAM_ROWS = 128
# Buckets of more rows that stream the weights have the larger places.
STREAM_SMALL_TILE_ROWS = 128
STREAM_TILES = 8, 16
STREAM_THREADS = 640
# Rows up to which a block does the places in two halves: the second projection of one does not wait for its first.
HALVES_ROWS = 8
STRETCH_BYTES = 32  # of a Stretch in cuda/experts_stretch.cuh
STREAM_SLOTS = 4  # of the ring of weights: more are slower
STREAM_BUFFERS = 3  # of sums
UNITS_THREADS = 640  # of the kernels for larger buckets
# With more pairs an expert, f16 pays: decoding takes longer, but all products of a row go into one sum.
GROUPED_PAIRS = 32
GROUPED_TILE = 32
PREFILL_TILES = 64, 128

Macros = dict[str, int | float | str]


@dataclass(frozen=True)
class _Operands:
    x: TensorRef
    logits: TensorRef
    bias: TensorRef | None
    table: TensorRef | None
    token_ids: TensorRef | None
    experts: TensorRef
    topology: TensorRef | None  # of this SM count
    out: TensorRef
    inner: int
    choices: int
    scale: float
    limit: float
    groups: int

    @property
    def count(self) -> int:
        return self.logits.sizes[1]

    @property
    def hidden(self) -> int:
        return self.x.sizes[1]

    @property
    def fp8(self) -> bool:
        return self.experts.dtype is DType.F8E4M3

    @property
    def topologies(self) -> tuple[TensorRef, ...]:
        """As an argument, of kernels for several groups."""
        return (self.topology,) if self.topology is not None and self.groups > 1 else ()

    def average_pairs(self, tokens: int) -> float:
        """Of an expert, where all are chosen alike."""
        return tokens * self.choices / self.count

    def usual_pairs(self, tokens: int) -> float:
        """Most experts get no more of a random choice."""
        average = self.average_pairs(tokens)
        return average + 2 * math.sqrt(average)

    def places(self, pairs: int, tile: int) -> int:
        """The most places that pairs can make: one an expert hit, and one more for each full tile beyond."""
        hit = min(self.count, pairs)
        return hit + (pairs - hit) // tile


@dataclass(frozen=True)
class _Lists:
    """What the first call leaves in scratch."""

    tile: int  # pairs of a place
    weights: TensorRef
    pairs: TensorRef
    places: TensorRef
    heads: TensorRef
    xq: TensorRef
    xs: TensorRef
    row_counters: int  # of a row
    more_counters: int  # behind those of the places
    counters: TensorRef


def select_placed_experts(launch: Launch, selection: Selection, stream_rows: int = STREAM_ROWS) -> list[KernelCall]:
    operands = _operands(launch, selection)
    kernel = _kernel(operands, selection, stream_rows)
    lists = _lists(operands, selection, kernel)
    routing = _routing(operands, lists, selection)
    return [routing, {"stream": _stream, "grouped": _grouped, "prefill": _prefill}[kernel](operands, lists, selection)]


SELECTORS: dict[str, Selector] = {"placed_experts": select_placed_experts}

_Kernel = Literal["stream", "grouped", "prefill"]


def _kernel(operands: _Operands, selection: Selection, stream_rows: int) -> _Kernel:
    tokens = selection.tokens
    if tokens <= stream_rows and (tokens <= STREAM_SMALL_TILE_ROWS or _streams_large_places(operands, selection)):
        return "stream"
    return "grouped" if operands.average_pairs(tokens) <= GROUPED_PAIRS else "prefill"


def _streams_large_places(operands: _Operands, selection: Selection) -> bool:
    """Whether they hold what most experts get, and a block has the memory for them."""
    return operands.usual_pairs(selection.tokens) <= STREAM_TILES[-1] and _stream_slots(operands, selection) is not None


def _tile(operands: _Operands, kernel: _Kernel, tokens: int) -> int:
    """Pairs of a place. In `experts_prefill` as many as most experts get: a few have two places."""
    if kernel == "stream":
        return _stream_tile(tokens)
    if kernel == "grouped":
        return GROUPED_TILE
    return next((tile for tile in PREFILL_TILES if operands.usual_pairs(tokens) <= tile), PREFILL_TILES[-1])


def _stream_tile(tokens: int) -> int:
    small, large = STREAM_TILES
    return small if tokens <= STREAM_SMALL_TILE_ROWS else large


def _operands(launch: Launch, selection: Selection) -> _Operands:
    topology = optional_tensor(launch, 6)
    logits = tensor_arg(launch, 1)
    kind: TopologyKind = "striped" if topology is None else "pinned"  # `traced` has the groups of `pinned`
    operands = _Operands(
        x=tensor_arg(launch, 0),
        logits=logits,
        bias=optional_tensor(launch, 2),
        table=optional_tensor(launch, 3),
        token_ids=optional_tensor(launch, 4),
        experts=tensor_arg(launch, 5),
        topology=None if topology is None else _row(topology, selection),
        out=launch.outputs[0],
        inner=int_arg(launch, 7),
        choices=int_arg(launch, 8),
        scale=float_arg(launch, 9),
        limit=float_arg(launch, 10),
        groups=group_count(kind, logits.sizes[1], selection.sm_count, int_arg(launch, 11)),
    )
    # What the pass that makes the operator has checked.
    assert operands.x.dtype is DType.BF16 and logits.dtype is DType.F32, launch.name
    assert (operands.bias is None) == (operands.table is not None) == (operands.token_ids is not None), launch.name
    assert operands.hidden % 128 == operands.inner % 128 == 0, launch.name
    assert operands.count <= 512 and operands.choices <= min(16, operands.count), launch.name
    assert operands.out.offset % 16 == operands.out.strides[0] % 4 == 0, launch.name
    assert operands.experts.offset % 16 == operands.experts.strides[0] % 16 == 0, launch.name
    return operands


def _row(topologies: TensorRef, selection: Selection) -> TensorRef:
    """The table for the SM count in hand, among those of the target's."""
    counts = selection.target.sm_counts
    row = counts.index(selection.sm_count) if topologies.sizes[0] > 1 else 0
    start = row * topologies.strides[0] * topologies.dtype.size_bytes
    return replace(
        topologies,
        offset=topologies.offset + start,
        sizes=topologies.sizes[1:],
        strides=topologies.strides[1:],
        dims=topologies.dims[1:],
    )


def _lists(operands: _Operands, selection: Selection, kernel: _Kernel) -> _Lists:
    tokens, hidden = selection.tokens, operands.hidden
    tile = _tile(operands, kernel, tokens)
    pairs = tokens * operands.choices
    places = operands.places(pairs, tile)
    row_counters, more_counters = {
        # One for each 64 columns of a row of the result.
        "stream": (hidden // 64, 0),
        # One for each 256 columns of the result, and one for each group of SMs.
        "grouped": (0, ceil_div(hidden, 256) + operands.groups),
        # One more for each place, and two for each group of SMs.
        "prefill": (0, places + ceil_div(hidden, 256) + 2 * operands.groups),
    }[kernel]
    f16 = kernel == "prefill"
    return _Lists(
        tile=tile,
        weights=selection.scratch(DType.F32, tokens, operands.choices),
        pairs=selection.scratch(DType.I32, pairs),
        places=selection.scratch(DType.I32, places, PLACE_INTS),
        heads=selection.scratch(DType.I32, operands.groups + 1),
        xq=selection.scratch(DType.F16 if f16 else DType.F8E4M3, tokens, hidden),
        xs=selection.scratch(DType.F32, tokens, *(() if f16 else (hidden // 128,))),
        row_counters=row_counters,
        more_counters=more_counters,
        counters=selection.scratch(DType.I32, places + more_counters + tokens * row_counters),
    )


def _routing(operands: _Operands, lists: _Lists, selection: Selection) -> KernelCall:
    """The call that fills `lists`."""
    tokens, x = selection.tokens, operands.x
    by = operands.bias or operands.table
    assert by is not None
    router = (operands.logits, by, *([operands.token_ids] if operands.token_ids else []), x)
    macros: Macros = {
        "X_ROWS": tokens,
        "HIDDEN": operands.hidden,
        "X_STRIDE": x.strides[0],
        "VECTOR": int(x.offset % 16 == x.strides[0] % 8 == 0),
        "EXPERTS": operands.count,
        "LOGITS_STRIDE": operands.logits.strides[0],
        "CHOICES": operands.choices,
        "SCALE": operands.scale,
        "BIASED": int(operands.bias is not None),
        "CHOICE_TYPE": cuda_type(by),
        "TILE": lists.tile,
        "GROUPS": operands.groups,
        "ROW_COUNTERS": lists.row_counters,
        "MORE_COUNTERS": lists.more_counters,
    }
    # Who makes the lists has a thread for every expert, and a warp for 32 pairs while there are some.
    threads = max(ROW_THREADS, _round_up(operands.count, 32))
    results = (lists.weights, lists.pairs, lists.places, lists.heads, lists.xq, lists.xs, lists.counters)
    if tokens <= ONE_BLOCK_ROWS:
        threads = min(1024, max(threads, 256 * tokens))
        octets = tokens * operands.hidden // 8
        variant = cuda_variant("experts_lists", "experts_lists", BLOCK_ROWS=0, THREADS=threads, **macros)
        shared_bytes = 8 * tokens * operands.count + _histogram_bytes(operands, tokens, threads)
        grid = (1 + ceil_div(octets, threads), 1, 1)
        return KernelCall(variant, grid, threads, (*router, *operands.topologies, *results), shared_bytes)
    rows = 1 if tokens <= ONE_ROW_ROWS else MOST_ROWS_THREADS // ROW_THREADS
    threads = max(threads, rows * ROW_THREADS, min(MOST_ROWS_THREADS, _round_up(tokens * operands.choices, 32)))
    threads = _round_up(threads, 32 * rows)
    ids = selection.scratch(DType.I32, tokens, operands.choices)
    f16 = int(lists.xq.dtype is DType.F16)
    variant = cuda_variant("experts_lists", "experts_rows", BLOCK_ROWS=rows, THREADS=threads, F16=f16, **macros)
    shared_bytes = _histogram_bytes(operands, tokens, threads)
    args = (*router, *operands.topologies, ids, *results)
    return KernelCall(variant, (ceil_div(tokens, rows), 1, 1), threads, args, shared_bytes)


def _histogram_bytes(operands: _Operands, tokens: int, threads: int) -> int:
    """HISTOGRAM_BYTES of cuda/place_lists.cuh."""
    return min(threads // 32, ceil_div(tokens * operands.choices, 32)) * operands.count * 4


def _expert_macros(operands: _Operands, lists: _Lists, selection: Selection) -> Macros:
    return {
        "FP8": int(operands.fp8),
        "HIDDEN": operands.hidden,
        "INNER": operands.inner,
        "EXPERTS": operands.count,
        "CHOICES": operands.choices,
        "RECORD_BYTES": operands.experts.strides[0],
        "LIMIT": operands.limit,
        "SMS": selection.sm_count,
        "GROUPS": operands.groups,
        "TILE": lists.tile,
        "ROWS": selection.tokens,
        "OUT_STRIDE": operands.out.strides[0],
    }


def _expert_args(operands: _Operands, lists: _Lists) -> tuple[TensorRef, ...]:
    """The arguments that both kernels begin with."""
    read = (lists.xq, lists.xs, lists.weights, lists.pairs, lists.places, lists.heads)
    return (*read, *operands.topologies, operands.experts)


def _stream(operands: _Operands, lists: _Lists, selection: Selection) -> KernelCall:
    slots = _stream_slots(operands, selection)
    if slots is None:
        raise PlanError(
            f"experts of {operands.hidden} and {operands.inner} columns do not fit in the shared memory of a block",
            hint='use the kernels of several launches: `[experts] layout = "checkpoint"` in the recipe',
        )
    pairs = selection.tokens * operands.choices
    h = selection.scratch(DType.BF16, pairs, operands.inner)
    parts = selection.scratch(DType.F32, pairs, operands.hidden)
    shared_bytes = _stream_bytes(operands, selection.tokens, slots)
    macros = _expert_macros(operands, lists, selection)
    macros |= {"SLOTS": slots, "SHARED_BYTES": shared_bytes, "HALVES": int(selection.tokens <= HALVES_ROWS)}
    variant = cuda_variant("experts_stream", "experts_stream", **macros)
    args = (*_expert_args(operands, lists), h, parts, lists.counters, operands.out)
    grid = (selection.sm_count, 1, 1)
    return KernelCall(variant, grid, STREAM_THREADS, args, shared_bytes, programmatic=True)


def _stream_slots(operands: _Operands, selection: Selection) -> int | None:
    """Of the ring: fewer where memory is short, None where there is too little."""
    for slots in (STREAM_SLOTS, STREAM_SLOTS - 1, 2):
        if _stream_bytes(operands, selection.tokens, slots) <= selection.target.smem_per_block:
            return slots
    return None


def _stream_bytes(operands: _Operands, tokens: int, slots: int) -> int:
    """The size of `Shared` in cuda/experts_stream.cuh, which compares it."""
    tile = _stream_tile(tokens)
    columns = ceil_div(max(operands.hidden, operands.inner), 512)
    pairs = tokens * operands.choices
    inputs = 4 * columns * tile * (128 + 4)
    sums = STREAM_BUFFERS * 16 * (tile // 8) * 512
    pair_numbers = pairs * (4 if tile == 8 else 2)
    lists = operands.places(pairs, tile) * 16 + _round_up(pair_numbers, 4) + STRETCH_BYTES
    barriers = 2 * (slots + STREAM_BUFFERS)
    used = slots * 4 * _tile_bytes(operands) + inputs + sums + lists
    return _round_up(_round_up(used, 8) + 8 * barriers, 16)


def _grouped(operands: _Operands, lists: _Lists, selection: Selection) -> KernelCall:
    pairs = selection.tokens * operands.choices
    h = selection.scratch(DType.F8E4M3, pairs, operands.inner)
    h_scales = selection.scratch(DType.F32, pairs, operands.inner // 128)
    return _units_call(
        "experts_grouped", operands, lists, selection, (h, h_scales), _grouped_bytes(operands, lists.tile)
    )


def _prefill(operands: _Operands, lists: _Lists, selection: Selection) -> KernelCall:
    # The inputs of every place begin at a multiple of the widths that products have.
    pairs = selection.tokens * operands.choices + (16 if lists.tile > 64 else 8) * lists.places.sizes[0]
    packed = selection.scratch(DType.F16, pairs, operands.hidden)
    h = selection.scratch(DType.F16, pairs, operands.inner)
    shared_bytes = _prefill_bytes(operands, lists.tile)
    shift = _h_shift(operands)
    return _units_call("experts_prefill", operands, lists, selection, (packed, h), shared_bytes, H_SHIFT=shift)


def _units_call(
    name: str,
    operands: _Operands,
    lists: _Lists,
    selection: Selection,
    inputs: tuple[TensorRef, TensorRef],
    shared_bytes: int,
    **macros: int,
) -> KernelCall:
    parts = selection.scratch(DType.F32, selection.tokens * operands.choices, operands.hidden)
    macros_of_all = _expert_macros(operands, lists, selection)
    variant = cuda_variant(name, name, SHARED_BYTES=shared_bytes, **macros_of_all, **macros)
    args = (*_expert_args(operands, lists), *inputs, parts, lists.counters, operands.out)
    return KernelCall(variant, (selection.sm_count, 1, 1), UNITS_THREADS, args, shared_bytes, programmatic=True)


def _h_shift(operands: _Operands) -> int:
    """The largest power of two that leaves h in the range of f16, whose largest number is 65504.

    h is at most limit^2 (silu(gate) and up) times `scale`, which the weights of a row add up to; rounding to bf16 and
    e4m3 adds less than a tenth.
    """
    return math.floor(math.log2(65504 / 1.1 / (operands.limit**2 * operands.scale)))


def _grouped_bytes(operands: _Operands, tile: int) -> int:
    """The size of `Shared` in cuda/experts_grouped.cuh, which compares it."""
    stages = 4 if operands.fp8 else 6
    stage = 8 * 16 * tile + 4 * _tile_bytes(operands) + 4 * (tile // 4 + 4) * 4
    units = 2 * (32 + 3 * 4 * tile)
    rounded = 8 * (16 * tile + 16) + 16 * tile * 2 + tile * 4
    return _round_up(stages * _round_up(stage, 128) + units + rounded + 8 * (2 * stages + 4), 128)


def _prefill_bytes(operands: _Operands, tile: int) -> int:
    """The size of `Shared` in cuda/experts_prefill.cuh, which compares it."""
    many = tile > 64
    weights_stages = (3 if many else 4) if operands.fp8 else (4 if many else 7)
    inputs_stages = (2 if operands.fp8 else 3) if many else 4
    step = 256 * tile
    weights = weights_stages * 4 * _tile_bytes(operands)
    packing = 2 * 8 * 512
    units = 2 * (32 + 3 * 4 * tile)
    finish = step + 16 * tile * 2 + tile * 4
    barriers = 8 * 2 * (weights_stages + inputs_stages + 2)
    return _round_up(inputs_stages * step + weights + packing + units + finish + barriers, 128)


def _tile_bytes(operands: _Operands) -> int:
    """64 rows and 128 columns of packed weights."""
    return TILE_BYTES[Encoding.FP8_BLOCK if operands.fp8 else Encoding.FP4_GROUP]


def _round_up(size: int, unit: int) -> int:
    return ceil_div(size, unit) * unit
