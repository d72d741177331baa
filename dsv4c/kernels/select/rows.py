"""Operators that take rows one by one: norms, rotations, roundings, sums, gathers."""

import math
from dataclasses import dataclass

from dsv4c.errors import PlanError
from dsv4c.graph.fused_ops import RowRounding
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
from dsv4c.step_abi import Dim, DType

CHUNK = 8  # channels that a thread loads at once (cuda/chunk.cuh)
VECTOR_BYTES = 16
ROW_FIELDS = {Dim.TOKENS: "tokens", Dim.LOGITS: "logits_rows"}  # of the step's header

# Chunks of a row that one thread keeps in registers: more where a warp can have the row for itself.
_WARP_CHUNKS = 4
_BLOCK_CHUNKS = 2
_BLOCK = 128


def select_rms_norm(launch: Launch, selection: Selection) -> list[KernelCall]:
    x = tensor_arg(launch, 0)
    return [_chain(launch, x, norm=True, weight=optional_tensor(launch, 1), eps=float_arg(launch, 2))]


def select_fp8_round(launch: Launch, selection: Selection) -> list[KernelCall]:
    x, group, width = tensor_arg(launch, 0), int_arg(launch, 1), int_arg(launch, 2)
    return [_chain(launch, x, rounding=RowRounding.FP8, group=group, rounded=width)]


def select_fp4_round(launch: Launch, selection: Selection) -> list[KernelCall]:
    return [_chain(launch, tensor_arg(launch, 0), rounding=RowRounding.FP4, group=int_arg(launch, 1))]


def select_hadamard(launch: Launch, selection: Selection) -> list[KernelCall]:
    return [_chain(launch, tensor_arg(launch, 0), hadamard=True)]


def select_rope(launch: Launch, selection: Selection) -> list[KernelCall]:
    x, rotation = tensor_arg(launch, 0), (tensor_arg(launch, 1), tensor_arg(launch, 2))
    return [_chain(launch, x, rotation=rotation, inverse=bool(int_arg(launch, 3)))]


def select_row_chain(launch: Launch, selection: Selection) -> list[KernelCall]:
    inv_freq = optional_tensor(launch, 3)
    return [
        _chain(
            launch,
            tensor_arg(launch, 0),
            norm=bool(int_arg(launch, 4)),
            weight=optional_tensor(launch, 1),
            eps=float_arg(launch, 5),
            rotation=None if inv_freq is None else (tensor_arg(launch, 2), inv_freq),
            inverse=bool(int_arg(launch, 6)),
            hadamard=bool(int_arg(launch, 7)),
            rounding=RowRounding(int_arg(launch, 8)),
            group=int_arg(launch, 9),
            rounded=int_arg(launch, 10),
        )
    ]


def select_swiglu(launch: Launch, selection: Selection) -> list[KernelCall]:
    return [_elementwise(launch, "swiglu", float_arg(launch, 2))]


def select_add(launch: Launch, selection: Selection) -> list[KernelCall]:
    return [_elementwise(launch, "add", 0.0)]


def select_embedding(launch: Launch, selection: Selection) -> list[KernelCall]:
    return [_gather(launch, tensor_arg(launch, 1), tensor_arg(launch, 0))]


def select_gather_rows(launch: Launch, selection: Selection) -> list[KernelCall]:
    return [_gather(launch, tensor_arg(launch, 0), tensor_arg(launch, 1))]


SELECTORS: dict[str, Selector] = {
    "add": select_add,
    "embedding": select_embedding,
    "fp4_round": select_fp4_round,
    "fp8_round": select_fp8_round,
    "gather_rows": select_gather_rows,
    "hadamard": select_hadamard,
    "rms_norm": select_rms_norm,
    "rope": select_rope,
    "row_chain": select_row_chain,
    "swiglu": select_swiglu,
}


@dataclass(frozen=True)
class _Rows:
    """A tensor [rows, W] or [rows, H, W] as rows of heads."""

    capacity: int
    heads: int
    width: int
    row_stride: int
    head_stride: int


def _rows(tensor: TensorRef) -> _Rows:
    assert len(tensor.sizes) in (2, 3) and tensor.strides[-1] == 1, tensor
    heads, head_stride = (1, 0) if len(tensor.sizes) == 2 else (tensor.sizes[1], tensor.strides[1])
    return _Rows(tensor.sizes[0], heads, tensor.sizes[-1], tensor.strides[0], head_stride)


def starts_on(tensor: TensorRef, alignment: int) -> bool:
    """Whether every row of a tensor starts on a multiple of `alignment` bytes."""
    size = tensor.dtype.size_bytes
    return all(byte % alignment == 0 for byte in (tensor.offset, *(stride * size for stride in tensor.strides[:-1])))


def _vector(*tensors: TensorRef) -> int:
    """Whether chunks can be loaded and stored whole."""
    plain = {DType.F32, DType.BF16}
    return int(
        all(t.dtype in plain and t.sizes[-1] % CHUNK == 0 and starts_on(t, VECTOR_BYTES) for t in tensors),
    )


def _strides(**tensors: TensorRef) -> dict[str, int]:
    """`x=tensor` -> X_ROW and X_HEAD."""
    found: dict[str, int] = {}
    for name, tensor in tensors.items():
        rows = _rows(tensor)
        found |= {f"{name.upper()}_ROW": rows.row_stride, f"{name.upper()}_HEAD": rows.head_stride}
    return found


def _power_of_two(size: int) -> int:
    """The next one from `size` up."""
    return 1 << (size - 1).bit_length()


def _row_threads(width: int, group: int, hadamard: bool) -> int:
    """Threads for one row: part of a warp, or whole warps. A group of a scale must lie in one warp."""
    chunks = ceil_div(width, CHUNK)
    if hadamard or chunks <= _WARP_CHUNKS * 32:
        return min(32, max(_power_of_two(chunks), group // CHUNK, 8))
    return min(1024, _power_of_two(ceil_div(chunks, _BLOCK_CHUNKS)))


def _chain(
    launch: Launch,
    x: TensorRef,
    *,
    norm: bool = False,
    weight: TensorRef | None = None,
    eps: float = 0.0,
    rotation: tuple[TensorRef, TensorRef] | None = None,
    inverse: bool = False,
    hadamard: bool = False,
    rounding: RowRounding = RowRounding.NONE,
    group: int = 0,
    rounded: int = 0,
) -> KernelCall:
    """One launch of `row_chain`."""
    (y,) = launch.outputs
    rows = _rows(x)
    width = rows.width
    rotary = 0 if rotation is None else 2 * rotation[1].sizes[0]
    if rotary and (width % 2 or rotary > width):
        raise PlanError(f"%{launch.name} rotates {rotary} of {width} channels; pairs must end an even number of them")
    if rounding is RowRounding.NONE:
        group = 0
    elif group not in (8, 16, 32, 64, 128, 256):
        raise PlanError(
            f"%{launch.name} rounds in groups of {group} channels; the kernels take powers of two from 8 to 256"
        )
    if rounding is RowRounding.FP4:
        rounded = width
    threads = _row_threads(width, group, hadamard)
    block = threads if threads > 32 else _BLOCK  # whole warps share a barrier, so they have one row
    used = [x]
    if norm and weight is not None:
        used.append(weight)
    vector = _vector(x, y, *used[1:])
    if rotation is not None:
        used += rotation
    constants: dict[str, int | float | str] = {
        "X_TYPE": cuda_type(x),
        "ROWS": ROW_FIELDS[x.dims[0]],
        "HEADS": rows.heads,
        "WIDTH": width,
        **_strides(x=x, y=y),
        "VECTOR": vector,
        "NORM": 0 if not norm else 1 if weight is None else 2,
        "ROPE": rotary,
        "HADAMARD": int(hadamard),
        "ROUNDING": int(rounding),
        "THREADS": threads,
        "BLOCK": block,
    }
    if norm:
        constants["EPS"] = eps
    if norm and weight is not None:
        constants["WEIGHT_TYPE"] = cuda_type(weight)
    if rotary:
        constants["INVERSE"] = int(inverse)
    if hadamard:
        constants["HADAMARD_SCALE"] = 1 / math.sqrt(width)
    if rounding is not RowRounding.NONE:
        constants |= {"GROUP": group, "ROUNDED": rounded}
    grid = (ceil_div(rows.capacity * rows.heads, block // threads), 1, 1)
    return KernelCall(cuda_variant("row_chain", "row_chain", **constants), grid, block, (*used, y))


def _chunk_grid(rows: _Rows) -> tuple[tuple[int, int, int], int]:
    """Grid and block of the kernels in which a thread has one chunk."""
    chunks = ceil_div(rows.width, CHUNK)
    block = min(256, max(32, _power_of_two(chunks)))
    return (rows.capacity * rows.heads, ceil_div(chunks, block), 1), block


def _elementwise(launch: Launch, operation: str, limit: float) -> KernelCall:
    a, b, (y,) = tensor_arg(launch, 0), tensor_arg(launch, 1), launch.outputs
    rows = _rows(y)
    grid, block = _chunk_grid(rows)
    variant = cuda_variant(
        "elementwise",
        "elementwise",
        OPERATION=operation,
        LIMIT=limit,
        A_TYPE=cuda_type(a),
        B_TYPE=cuda_type(b),
        Y_TYPE=cuda_type(y),
        ROWS=ROW_FIELDS[y.dims[0]],
        HEADS=rows.heads,
        WIDTH=rows.width,
        VECTOR=_vector(a, b, y),
        BLOCK=block,
        **_strides(a=a, b=b, y=y),
    )
    return KernelCall(variant, grid, block, (a, b, y))


def _gather(launch: Launch, x: TensorRef, numbers: TensorRef) -> KernelCall:
    (y,) = launch.outputs
    rows = _rows(y)
    grid, block = _chunk_grid(rows)
    variant = cuda_variant(
        "gather",
        "gather",
        X_TYPE=cuda_type(x),
        Y_TYPE=cuda_type(y),
        ROWS=ROW_FIELDS[y.dims[0]],
        HEADS=rows.heads,
        WIDTH=rows.width,
        VECTOR=_vector(x, y),
        BLOCK=block,
        **_strides(x=x, y=y),
    )
    return KernelCall(variant, grid, block, (x, numbers, y))
