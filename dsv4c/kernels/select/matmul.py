"""Selectors of `linear` and `grouped_linear`.

Few rows stream the matrix through warps that split its columns (`cuda/linear.cu`); many rows take tiles
(`triton/linear.py`); float32 activations or weights, and what is not aligned, take `cuda/linear_plain.cu`.
"""

from dataclasses import dataclass

from dsv4c.kernels.select.selection import (
    Selection,
    Selector,
    ceil_div,
    cuda_type,
    cuda_variant,
    int_arg,
    optional_tensor,
    tensor_arg,
    triton_variant,
)
from dsv4c.kernels.select.stored_matrix import StoredMatrix, stored_matrix
from dsv4c.plan.execution_plan import KernelCall, Launch, TensorRef
from dsv4c.step_abi import Dim, DType

# Rows of x that a warp's tile of the matrix is multiplied with at once.
STREAM_TOKENS = 16
TILE_ROWS = 128
PLAIN_ROWS, PLAIN_TOKENS = 64, 16
SUM_COLUMNS = 1024

_POINTERS = {DType.F32: "*fp32", DType.BF16: "*bf16", DType.F8E4M3: "*u8", DType.F8E8M0: "*u8"}


@dataclass(frozen=True)
class _Product:
    """x [T, groups * I] by a matrix [groups * rows, I] -> out [T, groups * rows]."""

    x: TensorRef
    matrix: StoredMatrix
    out: TensorRef
    groups: int

    @property
    def rows(self) -> int:
        return self.matrix.rows // self.groups

    @property
    def head(self) -> bool:
        return self.x.dims[0] is Dim.LOGITS

    def macros(self) -> dict[str, int | float | str]:
        return {
            **self.matrix.macros(),
            "X_STRIDE": self.x.strides[0],
            "OUT_TYPE": cuda_type(self.out),
            "OUT_STRIDE": self.out.strides[0],
            "ROWS": self.rows,
            "HEAD": int(self.head),
        }

    def x_aligned(self) -> bool:
        places = (self.x.offset, self.x.strides[0] * 2, self.matrix.columns * 2 if self.groups > 1 else 0)
        return self.x.dtype is DType.BF16 and all(place % 16 == 0 for place in places)


def select_linear(launch: Launch, selection: Selection) -> list[KernelCall]:
    return _select(launch, selection, 1)


def select_grouped_linear(launch: Launch, selection: Selection) -> list[KernelCall]:
    return _select(launch, selection, int_arg(launch, 5))


SELECTORS: dict[str, Selector] = {"linear": select_linear, "grouped_linear": select_grouped_linear}


def _select(launch: Launch, selection: Selection, groups: int) -> list[KernelCall]:
    matrix = stored_matrix(
        launch.name, tensor_arg(launch, 1), optional_tensor(launch, 2), int_arg(launch, 3), int_arg(launch, 4)
    )
    product = _Product(tensor_arg(launch, 0), matrix, launch.outputs[0], groups)
    if product.x_aligned() and matrix.fits_tensor_cores():
        if selection.tokens <= STREAM_TOKENS:
            return [_stream(product, selection)]
        tile_k = _tile_columns(matrix)
        if tile_k:
            return _tiles(product, selection, tile_k)
    return [_plain(product, selection)]


def _stream(product: _Product, selection: Selection) -> KernelCall:
    tiles = ceil_div(product.rows, 16) * product.groups
    chunks = ceil_div(product.matrix.columns, product.matrix.chunk_columns)
    groups = 1 if selection.tokens <= 8 else 2
    # As measured on an H200: fewer tiles and longer rows want more warps to a row, and more blocks on an SM.
    k_warps = 4 if tiles >= 1024 else 8 if tiles >= 256 and chunks <= 64 else 16 if tiles >= 64 else 32
    while k_warps > 1 and chunks < 2 * k_warps:
        k_warps //= 2
    row_warps = max(1, 8 // k_warps)
    share = ceil_div(chunks, k_warps)
    depth = {4: 4, 8: 8, 16: 2 if share >= 8 else 4, 32: 2}.get(k_warps, 4)
    variant = cuda_variant(
        "linear",
        "linear_stream",
        **product.macros(),
        ROW_WARPS=row_warps,
        K_WARPS=k_warps,
        TOKEN_GROUPS=groups,
        DEPTH=min(depth, share),
        MIN_BLOCKS={4: 3, 8: 2, 16: 2}.get(k_warps, 1) if groups == 1 else 1,
    )
    grid = (ceil_div(product.rows, 16 * row_warps), product.groups, 1)
    return KernelCall(variant, grid, row_warps * k_warps * 32, (product.x, *product.matrix.tensors, product.out))


def _tile_columns(matrix: StoredMatrix) -> int:
    """Columns of a step of the tiled kernel: under one scale; 0 where it cannot read the matrix."""
    if matrix.scales is None:
        return 64
    if matrix.weight.dtype is not DType.F8E4M3:
        return 0
    if matrix.block_cols >= matrix.columns:
        return 128
    return next((columns for columns in (128, 64) if matrix.block_cols % columns == 0), 0)


def _tiles(product: _Product, selection: Selection, tile_k: int) -> list[KernelCall]:
    matrix, out = product.matrix, product.out
    scaled = matrix.scales is not None
    # As measured on an H200: decoding pays over many rows.
    tile_tokens = 64 if selection.tokens <= 64 else 256 if scaled else 128
    tile_k = tile_k if tile_tokens == 64 else min(tile_k, 64)
    tiles = ceil_div(product.rows, TILE_ROWS) * ceil_div(selection.tokens, tile_tokens)
    steps = ceil_div(matrix.columns, tile_k)
    # Stretches of the columns while there are SMs without a tile, each of 8 steps or more.
    parts = min(max(1, selection.sm_count // (tiles * product.groups)), max(1, steps * tile_k // 512), 8)
    parts = 1 << (parts.bit_length() - 1)
    to = out if parts == 1 else selection.scratch(DType.F32, parts, selection.tokens, product.rows * product.groups)
    scales = matrix.scales or matrix.weight
    pointers = (product.x, matrix.weight, scales, to)
    variant = triton_variant(
        "linear",
        warps=8,
        stages=3 if scaled and tile_tokens == 64 else 4,
        SIGNATURE=",".join([*(_POINTERS[ref.dtype] for ref in pointers), "*i32"]),
        ALIGN=",".join([*("16" if ref.offset % 16 == 0 else "1" for ref in pointers), "16"]),
        ROWS=product.rows,
        COLUMNS=matrix.columns,
        X_STRIDE=product.x.strides[0],
        W_STRIDE=matrix.weight.strides[0],
        S_STRIDE=scales.strides[0],
        OUT_STRIDE=to.strides[-2],
        BLOCK_ROWS=0 if matrix.scales is None else matrix.block_rows,
        BLOCK_COLS=matrix.block_cols,
        EXPONENTS=int(scales.dtype is DType.F8E8M0),
        HEAD=int(product.head),
        SPLIT=int(parts > 1),
        TILE_ROWS=TILE_ROWS,
        TILE_TOKENS=tile_tokens,
        TILE_K=tile_k,
    )
    call = KernelCall(variant, (tiles, product.groups, parts), 32 * variant.warps, pointers)
    if parts == 1:
        return [call]
    width = product.rows * product.groups
    total = cuda_variant(
        "linear_sum", "linear_sum", WIDTH=width, PARTS=parts, OUT_TYPE=cuda_type(out), HEAD=int(product.head)
    )
    return [call, KernelCall(total, (ceil_div(width, SUM_COLUMNS), selection.tokens, 1), 256, (to, out))]


def _plain(product: _Product, selection: Selection) -> KernelCall:
    variant = cuda_variant("linear_plain", "linear_plain", **product.macros(), X_TYPE=cuda_type(product.x))
    grid = (ceil_div(product.rows, PLAIN_ROWS), ceil_div(selection.tokens, PLAIN_TOKENS), product.groups)
    return KernelCall(variant, grid, 256, (product.x, *product.matrix.tensors, product.out))
