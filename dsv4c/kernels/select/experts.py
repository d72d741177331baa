"""Selector of `moe_ffn`: four launches (`cuda/experts.cuh`) that read the weights of the experts hit and no others.

On tensor cores (`cuda/experts.cu`) while x is bf16 and the matrices are aligned, else in float32
(`cuda/experts_plain.cu`), where the rounding of h is a fifth launch.
"""

from dataclasses import dataclass

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
from dsv4c.kernels.select.stored_matrix import CHUNK_BYTES, StoredMatrix, stored_matrix
from dsv4c.plan.execution_plan import KernelCall, Launch, TensorRef
from dsv4c.step_abi import DType

ROUTE_THREADS = 256
SUM_COLUMNS = 1024
PLAIN_ROWS, PLAIN_TILE = 64, 16
GATE_UP_WARPS = 8  # by rows; each has 16 rows of w1 and of w3
H_COLUMNS = 16 * GATE_UP_WARPS
TILE_INTS = 4  # of a Tile in cuda/experts.cuh

Macros = dict[str, int | float | str]


@dataclass(frozen=True)
class _Shape:
    """How the launches on tensor cores share the work. `tile`: pairs of a row and an expert that a block takes."""

    tile: int
    gate_up_k_warps: int
    down_warps: int  # by rows, 32 each
    down_k_warps: int
    stages: int
    gate_up_depth: int = 2  # chunks of weights under way
    down_depth: int = 2
    min_blocks: int = 1  # on an SM
    down_blocks: int = 1


@dataclass(frozen=True)
class _Experts:
    x: TensorRef
    ids: TensorRef
    weights: TensorRef
    w13: StoredMatrix
    w2: StoredMatrix
    out: TensorRef
    limit: float
    act_group: int

    @property
    def count(self) -> int:
        return self.w13.weight.sizes[0]

    @property
    def choices(self) -> int:
        return self.ids.sizes[1]

    @property
    def inner(self) -> int:
        return self.w13.rows // 2

    def tiles(self, pairs: int, tile: int) -> int:
        """The most tiles that pairs can fall into: one an expert hit, and one more for each full tile beyond."""
        hit = min(self.count, pairs)
        return hit + (pairs - hit) // tile

    def on_tensor_cores(self) -> bool:
        return (
            self.x.dtype is DType.BF16
            and self.w13.weight.dtype is self.w2.weight.dtype
            and self.w13.fits_tensor_cores()
            and self.w2.fits_tensor_cores()
            and (self.act_group == 0 or H_COLUMNS % self.act_group == 0)
        )


def select_moe_ffn(launch: Launch, selection: Selection) -> list[KernelCall]:
    block_rows, block_cols = int_arg(launch, 7), int_arg(launch, 8)
    experts = _Experts(
        x=tensor_arg(launch, 0),
        ids=tensor_arg(launch, 1),
        weights=tensor_arg(launch, 2),
        w13=stored_matrix(launch.name, tensor_arg(launch, 3), optional_tensor(launch, 4), block_rows, block_cols),
        w2=stored_matrix(launch.name, tensor_arg(launch, 5), optional_tensor(launch, 6), block_rows, block_cols),
        out=launch.outputs[0],
        limit=float_arg(launch, 9),
        act_group=int_arg(launch, 10),
    )
    fast = experts.on_tensor_cores()
    tokens, pairs = selection.tokens, selection.tokens * experts.choices
    shape = _shape(experts, tokens)
    tile = shape.tile if fast else PLAIN_TILE
    tiles = experts.tiles(pairs, tile)

    def width(matrix: StoredMatrix) -> int:
        """Of the inputs of a matrix as they are prepared."""
        return ceil_div(matrix.columns, matrix.chunk_columns) * matrix.chunk_columns if fast else matrix.columns

    routed = (
        selection.scratch(DType.I32, pairs),
        selection.scratch(DType.I32, tiles, TILE_INTS),
        selection.scratch(DType.I32, 1),
    )
    x = selection.scratch(experts.x.dtype, tokens, width(experts.w13))
    h = selection.scratch(experts.x.dtype, pairs, width(experts.w2))
    parts = selection.scratch(DType.F32, pairs, experts.w2.rows)

    gate_up = (x, *routed, experts.weights, *experts.w13.tensors, h)
    down = (h, *routed, *experts.w2.tensors, parts)
    if fast:
        middle = [_gate_up(experts, shape, tiles, gate_up), _down(experts, shape, tiles, down)]
    else:
        middle = _plain(experts, tiles, pairs, gate_up, down)
    return [
        _route(experts, tile, fast, (experts.x, experts.ids, *routed, x), tokens),
        *middle,
        _sum(experts, (parts, experts.out), tokens),
    ]


SELECTORS: dict[str, Selector] = {"moe_ffn": select_moe_ffn}


def _shape(experts: _Experts, tokens: int) -> _Shape:
    """Tiles for as many pairs as an expert gets when all get the same; with few, more warps share the columns."""
    average = tokens * experts.choices / experts.count
    if tokens <= 8 or average <= 2:
        return _Shape(8, 2, 2, 4, stages=0, down_depth=1, down_blocks=3)
    if average <= 8:
        return _Shape(16, 2, 4, 2, stages=0, down_blocks=2)
    if average <= 32:
        return _Shape(32, 1, 8, 1, stages=3, gate_up_depth=1, down_depth=1, min_blocks=2, down_blocks=2)
    if average <= 64:
        return _Shape(64, 1, 8, 1, stages=3)
    return _Shape(128, 1, 8, 1, stages=3, gate_up_depth=1, down_depth=1)


def _route(experts: _Experts, tile: int, prepared: bool, args: tuple[TensorRef, ...], tokens: int) -> KernelCall:
    variant = cuda_variant(
        "experts_route",
        "experts_route",
        W_TYPE=cuda_type(experts.w13.weight),
        COLUMNS=experts.w13.columns,
        X_TYPE=cuda_type(experts.x),
        X_STRIDE=experts.x.strides[0],
        EXPERTS=experts.count,
        CHOICES=experts.choices,
        IDS_STRIDE=experts.ids.strides[0],
        TILE=tile,
        ACT_GROUP=experts.act_group,
        PREPARED=int(prepared),
    )
    return KernelCall(variant, (experts.count + tokens, 1, 1), ROUTE_THREADS, args)


def _gate_up_macros(experts: _Experts) -> Macros:
    return {
        **experts.w13.macros(),
        **experts.w13.expert_macros(),
        "DOWN": 0,
        "ROWS": experts.inner,
        "CHOICES": experts.choices,
        "LIMIT": experts.limit,
        "ACT_GROUP": experts.act_group,
        "WEIGHTS_STRIDE": experts.weights.strides[0],
    }


def _down_macros(experts: _Experts) -> Macros:
    return {
        **experts.w2.macros(),
        **experts.w2.expert_macros(),
        "DOWN": 1,
        "ROWS": experts.w2.rows,
        "CHOICES": experts.choices,
    }


def _shape_macros(shape: _Shape, row_warps: int, k_warps: int, depth: int, blocks: int) -> Macros:
    return {
        "TILE": shape.tile,
        "ROW_WARPS": row_warps,
        "K_WARPS": k_warps,
        "DEPTH": depth,
        "STAGES": shape.stages,
        "MIN_BLOCKS": blocks,
    }


def _shared_bytes(matrix: StoredMatrix, shape: _Shape, row_warps: int, k_warps: int) -> int:
    """For the stages of inputs, or for the sums of the warps that share columns."""
    chunk = matrix.chunk_columns * 2
    row = chunk if chunk % 128 == CHUNK_BYTES else chunk + CHUNK_BYTES
    partial = row_warps * (k_warps - 1) * 2 * (shape.tile // 8) * 32 * 16
    return max(shape.stages * shape.tile * row, partial)


def _gate_up(experts: _Experts, shape: _Shape, tiles: int, args: tuple[TensorRef, ...]) -> KernelCall:
    k_warps = shape.gate_up_k_warps
    variant = cuda_variant(
        "experts",
        "experts_gate_up",
        **_gate_up_macros(experts),
        **_shape_macros(shape, GATE_UP_WARPS, k_warps, shape.gate_up_depth, shape.min_blocks),
    )
    product_bytes = shape.tile * (H_COLUMNS + 1) * 4
    shared_bytes = max(_shared_bytes(experts.w13, shape, GATE_UP_WARPS, k_warps), product_bytes)
    grid = (ceil_div(experts.inner, H_COLUMNS), tiles, 1)
    return KernelCall(variant, grid, 32 * GATE_UP_WARPS * k_warps, args, shared_bytes)


def _down(experts: _Experts, shape: _Shape, tiles: int, args: tuple[TensorRef, ...]) -> KernelCall:
    warps, k_warps = shape.down_warps, shape.down_k_warps
    variant = cuda_variant(
        "experts",
        "experts_down",
        **_down_macros(experts),
        **_shape_macros(shape, warps, k_warps, shape.down_depth, shape.down_blocks),
    )
    grid = (ceil_div(experts.w2.rows, 32 * warps), tiles, 1)
    shared_bytes = _shared_bytes(experts.w2, shape, warps, k_warps)
    return KernelCall(variant, grid, 32 * warps * k_warps, args, shared_bytes)


def _plain(
    experts: _Experts, tiles: int, pairs: int, gate_up: tuple[TensorRef, ...], down: tuple[TensorRef, ...]
) -> list[KernelCall]:
    own: Macros = {"X_TYPE": cuda_type(experts.x), "TILE": PLAIN_TILE}
    first = cuda_variant("experts_plain", "experts_gate_up_plain", **_gate_up_macros(experts), **own)
    second = cuda_variant("experts_plain", "experts_down_plain", **_down_macros(experts), **own)
    calls = [KernelCall(first, (ceil_div(experts.inner, PLAIN_ROWS), tiles, 1), 256, gate_up)]
    if experts.act_group:
        rounding = cuda_variant("experts_plain", "experts_round", **_gate_up_macros(experts), **own)
        calls.append(KernelCall(rounding, (pairs, 1, 1), 256, gate_up[-1:]))
    return [*calls, KernelCall(second, (ceil_div(experts.w2.rows, PLAIN_ROWS), tiles, 1), 256, down)]


def _sum(experts: _Experts, args: tuple[TensorRef, ...], tokens: int) -> KernelCall:
    width = experts.w2.rows
    variant = cuda_variant(
        "experts_sum", "experts_sum", WIDTH=width, CHOICES=experts.choices, OUT_STRIDE=experts.out.strides[0]
    )
    return KernelCall(variant, (ceil_div(width, SUM_COLUMNS), tokens, 1), 256, args)
