"""The operands of `placed_experts`, and the launch in front of its experts: the router and its lists.

That launch is `cuda/experts_lists.cu`; `placed_experts.py` selects what takes the lists.
"""

import math
from dataclasses import dataclass, replace

from dsv4c.graph.topology import TopologyKind, group_count
from dsv4c.kernels.select.selection import (
    Selection,
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

Macros = dict[str, int | float | str]


@dataclass(frozen=True)
class PlacedOperands:
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
class PlaceLists:
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


def placed_operands(launch: Launch, selection: Selection) -> PlacedOperands:
    topology = optional_tensor(launch, 6)
    logits = tensor_arg(launch, 1)
    kind: TopologyKind = "striped" if topology is None else "pinned"  # `traced` has the groups of `pinned`
    operands = PlacedOperands(
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


def place_lists(
    operands: PlacedOperands,
    selection: Selection,
    tile: int,
    row_counters: int = 0,
    more_counters: int = 0,
    f16: bool = False,
) -> PlaceLists:
    """Scratch for them. `f16`: x as f16 with a multiplier a row, not as e4m3 with a scale for 128 columns."""
    tokens, hidden = selection.tokens, operands.hidden
    pairs = tokens * operands.choices
    places = operands.places(pairs, tile)
    return PlaceLists(
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


def routing_call(operands: PlacedOperands, lists: PlaceLists, selection: Selection) -> KernelCall:
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
    threads = max(ROW_THREADS, round_up(operands.count, 32))
    results = (lists.weights, lists.pairs, lists.places, lists.heads, lists.xq, lists.xs, lists.counters)
    if tokens <= ONE_BLOCK_ROWS:
        threads = min(1024, max(threads, 256 * tokens))
        octets = tokens * operands.hidden // 8
        variant = cuda_variant("experts_lists", "experts_lists", BLOCK_ROWS=0, THREADS=threads, **macros)
        shared_bytes = 8 * tokens * operands.count + _histogram_bytes(operands, tokens, threads)
        grid = (1 + ceil_div(octets, threads), 1, 1)
        return KernelCall(variant, grid, threads, (*router, *operands.topologies, *results), shared_bytes)
    rows = 1 if tokens <= ONE_ROW_ROWS else MOST_ROWS_THREADS // ROW_THREADS
    threads = max(threads, rows * ROW_THREADS, min(MOST_ROWS_THREADS, round_up(tokens * operands.choices, 32)))
    threads = round_up(threads, 32 * rows)
    ids = selection.scratch(DType.I32, tokens, operands.choices)
    f16 = int(lists.xq.dtype is DType.F16)
    variant = cuda_variant("experts_lists", "experts_rows", BLOCK_ROWS=rows, THREADS=threads, F16=f16, **macros)
    shared_bytes = _histogram_bytes(operands, tokens, threads)
    args = (*router, *operands.topologies, ids, *results)
    return KernelCall(variant, (ceil_div(tokens, rows), 1, 1), threads, args, shared_bytes)


def _histogram_bytes(operands: PlacedOperands, tokens: int, threads: int) -> int:
    """HISTOGRAM_BYTES of cuda/place_lists.cuh."""
    return min(threads // 32, ceil_div(tokens * operands.choices, 32)) * operands.count * 4


def round_up(size: int, unit: int) -> int:
    return ceil_div(size, unit) * unit
