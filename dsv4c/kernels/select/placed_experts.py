"""Selector of `placed_experts`: the router and its lists (`cuda/experts_lists.cu`), then all experts in one launch.

Steps of few rows stream the weights (`cuda/experts_stream.cu`), larger ones multiply them by the pairs of a place in
e4m3 (`cuda/experts_grouped.cu`), the largest in f16 (`cuda/experts_prefill.cu`). That launch starts while the lists are
being made and waits for them.
"""

import math
from typing import Literal

from dsv4c.checkpoint.expert_packing import TILE_BYTES
from dsv4c.checkpoint.formats import Encoding
from dsv4c.errors import PlanError
from dsv4c.kernels.select.expert_lists import (
    Macros,
    PlacedOperands,
    PlaceLists,
    place_lists,
    placed_operands,
    round_up,
    routing_call,
)
from dsv4c.kernels.select.selection import Selection, Selector, ceil_div, cuda_variant
from dsv4c.plan.execution_plan import KernelCall, Launch, TensorRef
from dsv4c.step_abi import DType

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


def select_placed_experts(launch: Launch, selection: Selection, stream_rows: int = STREAM_ROWS) -> list[KernelCall]:
    operands = placed_operands(launch, selection)
    kernel = _kernel(operands, selection, stream_rows)
    lists = _lists(operands, selection, kernel)
    routing = routing_call(operands, lists, selection)
    return [routing, {"stream": _stream, "grouped": _grouped, "prefill": _prefill}[kernel](operands, lists, selection)]


SELECTORS: dict[str, Selector] = {"placed_experts": select_placed_experts}

_Kernel = Literal["stream", "grouped", "prefill"]


def _kernel(operands: PlacedOperands, selection: Selection, stream_rows: int) -> _Kernel:
    tokens = selection.tokens
    if tokens <= stream_rows and (tokens <= STREAM_SMALL_TILE_ROWS or _streams_large_places(operands, selection)):
        return "stream"
    return "grouped" if operands.average_pairs(tokens) <= GROUPED_PAIRS else "prefill"


def _streams_large_places(operands: PlacedOperands, selection: Selection) -> bool:
    """Whether they hold what most experts get, and a block has the memory for them."""
    return operands.usual_pairs(selection.tokens) <= STREAM_TILES[-1] and _stream_slots(operands, selection) is not None


def _tile(operands: PlacedOperands, kernel: _Kernel, tokens: int) -> int:
    """Pairs of a place. In `experts_prefill` as many as most experts get: a few have two places."""
    if kernel == "stream":
        return _stream_tile(tokens)
    if kernel == "grouped":
        return GROUPED_TILE
    return next((tile for tile in PREFILL_TILES if operands.usual_pairs(tokens) <= tile), PREFILL_TILES[-1])


def _stream_tile(tokens: int) -> int:
    small, large = STREAM_TILES
    return small if tokens <= STREAM_SMALL_TILE_ROWS else large


def _lists(operands: PlacedOperands, selection: Selection, kernel: _Kernel) -> PlaceLists:
    """With the counters that the kernel wants."""
    tile = _tile(operands, kernel, selection.tokens)
    if kernel == "stream":
        # One for each 64 columns of a row of the result.
        return place_lists(operands, selection, tile, row_counters=operands.hidden // 64)
    # One for each 256 columns of the result, and one for each group of SMs.
    counters = ceil_div(operands.hidden, 256) + operands.groups
    if kernel == "grouped":
        return place_lists(operands, selection, tile, more_counters=counters)
    # One more for each place and group.
    counters += operands.places(selection.tokens * operands.choices, tile) + operands.groups
    return place_lists(operands, selection, tile, more_counters=counters, f16=True)


def _expert_macros(operands: PlacedOperands, lists: PlaceLists, selection: Selection) -> Macros:
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


def _expert_args(operands: PlacedOperands, lists: PlaceLists) -> tuple[TensorRef, ...]:
    """The arguments that both kernels begin with."""
    read = (lists.xq, lists.xs, lists.weights, lists.pairs, lists.places, lists.heads)
    return (*read, *operands.topologies, operands.experts)


def _stream(operands: PlacedOperands, lists: PlaceLists, selection: Selection) -> KernelCall:
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


def _stream_slots(operands: PlacedOperands, selection: Selection) -> int | None:
    """Of the ring: fewer where memory is short, None where there is too little."""
    for slots in (STREAM_SLOTS, STREAM_SLOTS - 1, 2):
        if _stream_bytes(operands, selection.tokens, slots) <= selection.target.smem_per_block:
            return slots
    return None


def _stream_bytes(operands: PlacedOperands, tokens: int, slots: int) -> int:
    """The size of `Shared` in cuda/experts_stream.cuh, which compares it."""
    tile = _stream_tile(tokens)
    columns = ceil_div(max(operands.hidden, operands.inner), 512)
    pairs = tokens * operands.choices
    inputs = 4 * columns * tile * (128 + 4)
    sums = STREAM_BUFFERS * 16 * (tile // 8) * 512
    pair_numbers = pairs * (4 if tile == 8 else 2)
    lists = operands.places(pairs, tile) * 16 + round_up(pair_numbers, 4) + STRETCH_BYTES
    barriers = 2 * (slots + STREAM_BUFFERS)
    used = slots * 4 * _tile_bytes(operands) + inputs + sums + lists
    return round_up(round_up(used, 8) + 8 * barriers, 16)


def _grouped(operands: PlacedOperands, lists: PlaceLists, selection: Selection) -> KernelCall:
    pairs = selection.tokens * operands.choices
    h = selection.scratch(DType.F8E4M3, pairs, operands.inner)
    h_scales = selection.scratch(DType.F32, pairs, operands.inner // 128)
    return _units_call(
        "experts_grouped", operands, lists, selection, (h, h_scales), _grouped_bytes(operands, lists.tile)
    )


def _prefill(operands: PlacedOperands, lists: PlaceLists, selection: Selection) -> KernelCall:
    # The inputs of every place begin at a multiple of the widths that products have.
    pairs = selection.tokens * operands.choices + (16 if lists.tile > 64 else 8) * lists.places.sizes[0]
    packed = selection.scratch(DType.F16, pairs, operands.hidden)
    h = selection.scratch(DType.F16, pairs, operands.inner)
    shared_bytes = _prefill_bytes(operands, lists.tile)
    shift = _h_shift(operands)
    return _units_call("experts_prefill", operands, lists, selection, (packed, h), shared_bytes, H_SHIFT=shift)


def _units_call(
    name: str,
    operands: PlacedOperands,
    lists: PlaceLists,
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


def _h_shift(operands: PlacedOperands) -> int:
    """The largest power of two that leaves h in the range of f16, whose largest number is 65504.

    h is at most limit^2 (silu(gate) and up) times `scale`, which the weights of a row add up to; rounding to bf16 and
    e4m3 adds less than a tenth.
    """
    return math.floor(math.log2(65504 / 1.1 / (operands.limit**2 * operands.scale)))


def _grouped_bytes(operands: PlacedOperands, tile: int) -> int:
    """The size of `Shared` in cuda/experts_grouped.cuh, which compares it."""
    stages = 4 if operands.fp8 else 6
    stage = 8 * 16 * tile + 4 * _tile_bytes(operands) + 4 * (tile // 4 + 4) * 4
    units = 2 * (32 + 3 * 4 * tile)
    rounded = 8 * (16 * tile + 16) + 16 * tile * 2 + tile * 4
    return round_up(stages * round_up(stage, 128) + units + rounded + 8 * (2 * stages + 4), 128)


def _prefill_bytes(operands: PlacedOperands, tile: int) -> int:
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
    return round_up(inputs_stages * step + weights + packing + units + finish + barriers, 128)


def _tile_bytes(operands: PlacedOperands) -> int:
    """64 rows and 128 columns of packed weights."""
    return TILE_BYTES[Encoding.FP8_BLOCK if operands.fp8 else Encoding.FP4_GROUP]
