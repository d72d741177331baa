"""Attention over the ring, this step's keys and the compressed entries; the ring's commit."""

from dsv4c.errors import PlanError
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
from dsv4c.kernels.select.state_planes import StatePlaneRows, state_plane
from dsv4c.plan.execution_plan import KernelCall, Launch, TensorRef
from dsv4c.step_abi import DType

Constants = dict[str, int | float | str]

# As in cuda/attention.cu.
_THREADS = 256
_KEY_TILE = 64
_WIDTH_ALIGN = 64
_MAX_WIDTH = 512  # of a head: the sums of 64 heads fill the registers
_ROW_PAD = 8

# Entries that splits are made for where a row sees all of them: more cost a block more tiles.
_LONG_ENTRIES = 4096
_PLAIN_HEADS = 8  # of a block, one a warp
_COMBINE_THREADS = 128
_RING_THREADS = 256


def select_attention(launch: Launch, selection: Selection) -> list[KernelCall]:
    return _attention(launch, selection, None)


def select_attention_unrotated(launch: Launch, selection: Selection) -> list[KernelCall]:
    return _attention(launch, selection, tensor_arg(launch, 15))


def select_commit_ring(launch: Launch, selection: Selection) -> list[KernelCall]:
    kv, slots, positions = tensor_arg(launch, 0), tensor_arg(launch, 3), tensor_arg(launch, 4)
    ring = state_plane(tensor_arg(launch, 1), optional_tensor(launch, 2))
    variant = cuda_variant(
        "ring",
        "commit_ring",
        HEAD_DIM=kv.sizes[1],
        ROTARY=int_arg(launch, 5),
        KV_TYPE=cuda_type(kv),
        KV_STRIDE=kv.strides[0],
        **_ring_constants(ring),
    )
    args = (kv, ring.rows, ring.exponents, slots, positions)
    return [KernelCall(variant, (selection.tokens, 1, 1), _RING_THREADS, args)]


def _attention(launch: Launch, selection: Selection, inv_freq: TensorRef | None) -> list[KernelCall]:
    q, kv, sink = tensor_arg(launch, 0), tensor_arg(launch, 1), tensor_arg(launch, 7)
    slots, positions, table = (tensor_arg(launch, index) for index in (8, 9, 10))
    ring = state_plane(tensor_arg(launch, 2), optional_tensor(launch, 3))
    plane, selected = optional_tensor(launch, 4), optional_tensor(launch, 6)
    entries = state_plane(plane, optional_tensor(launch, 5)) if plane else None
    constants = _constants(launch, q, kv, ring, entries, selected, inv_freq)
    # What is absent is not read either; another tensor stands in for it.
    stored = entries or ring
    keys = (kv, ring.rows, ring.exponents, stored.rows, stored.exponents, selected or positions)
    step = (sink, slots, positions, table, inv_freq or sink)
    if not _fits_tiles(launch, ring, entries):
        return [_plain(launch, selection, constants, (q, *keys, *step, *launch.outputs))]

    heads, width = q.sizes[1:]
    head_tile = 64 if heads > 32 else 32 if heads > 16 else 16
    constants["HEAD_TILE"] = head_tile
    constants["Q_VECTORS"] = int(_vectors(q))
    planes = [ring, entries] if entries else [ring]
    constants["KEY_VECTORS"] = int(_vectors(kv) and width % 8 == 0 and all(p.aligned(16, 8) for p in planes))
    head_tiles = ceil_div(heads, head_tile)
    splits = _splits(launch, selection, head_tiles, entries, selected)
    variant = cuda_variant("attention", "attention", SPLIT=int(splits > 1), **constants)
    grid = (selection.tokens, head_tiles, splits)
    shared_bytes = _tiles_shared_bytes(head_tile, width, planes)
    if splits == 1:
        return [KernelCall(variant, grid, _THREADS, (q, *keys, *step, *launch.outputs), shared_bytes)]
    sums = selection.scratch(DType.F32, selection.tokens, splits, heads, width)
    peaks = selection.scratch(DType.F32, selection.tokens, splits, heads, 2)
    combine = cuda_variant("attention_combine", "attention_combine", SPLITS=splits, **constants)
    return [
        KernelCall(variant, grid, _THREADS, (q, *keys, *step, sums, peaks), shared_bytes),
        KernelCall(combine, (selection.tokens, heads, 1), _COMBINE_THREADS, (sums, peaks, *step, *launch.outputs)),
    ]


def _constants(
    launch: Launch,
    q: TensorRef,
    kv: TensorRef,
    ring: StatePlaneRows,
    entries: StatePlaneRows | None,
    selected: TensorRef | None,
    inv_freq: TensorRef | None,
) -> Constants:
    out = launch.outputs[0]
    constants: Constants = {
        "HEADS": q.sizes[1],
        "HEAD_DIM": q.sizes[2],
        "ROTARY": int_arg(launch, 13),
        "WINDOW": int_arg(launch, 11),
        "RATIO": int_arg(launch, 12),
        "SCALE": float_arg(launch, 14),
        "Q_TYPE": cuda_type(q),
        "Q_STRIDE": q.strides[0],
        "Q_HEAD_STRIDE": q.strides[1],
        "KV_TYPE": cuda_type(kv),
        "KV_STRIDE": kv.strides[0],
        "OUT_STRIDE": out.strides[0],
        "OUT_HEAD_STRIDE": out.strides[1],
        "SINK_TYPE": cuda_type(tensor_arg(launch, 7)),
        "ROTATE": int(inv_freq is not None),
        "HAS_ENTRIES": int(entries is not None),
        "SELECTED": selected.sizes[1] if selected else 0,
        "SELECTED_STRIDE": selected.strides[0] if selected else 0,
        **_ring_constants(ring),
    }
    if entries:
        constants |= {
            "ENTRY_FORMAT": entries.format,
            "BLOCK_ROWS": entries.per_unit,
            "ENTRY_BYTES": entries.row_bytes,
            "ENTRY_EXPONENT_BYTES": entries.exponent_bytes,
        }
    return constants


def _ring_constants(ring: StatePlaneRows) -> Constants:
    return {
        "RING_FORMAT": ring.format,
        "RING_ROWS": ring.per_unit,
        "RING_BYTES": ring.row_bytes,
        "RING_EXPONENT_BYTES": ring.exponent_bytes,
    }


def _vectors(rows: TensorRef) -> bool:
    """Whether every row starts on a multiple of 16 bytes."""
    size = rows.dtype.size_bytes
    return rows.offset % 16 == 0 and all(stride * size % 16 == 0 for stride in rows.strides[:-1])


def _fits_tiles(launch: Launch, ring: StatePlaneRows, entries: StatePlaneRows | None) -> bool:
    """Whether the tensor cores can have it: bf16 queries and keys, and channels that lie in pairs."""
    q, kv, out = tensor_arg(launch, 0), tensor_arg(launch, 1), launch.outputs[0]
    formats = {ring.format} | ({entries.format} if entries else set())
    even = (q.sizes[2], int_arg(launch, 13), *out.strides[:2], out.offset // 2)
    return (
        q.dtype is DType.BF16
        and kv.dtype is DType.BF16
        and q.sizes[2] <= _MAX_WIDTH
        and formats <= {"STATE_KV", "STATE_BF16"}
        and not any(number % 2 for number in even)
    )


def _splits(
    launch: Launch, selection: Selection, head_tiles: int, entries: StatePlaneRows | None, selected: TensorRef | None
) -> int:
    """Blocks that share the keys of a row, so that a small step still uses every SM."""
    keys = int_arg(launch, 11)
    if entries:
        keys += selected.sizes[1] if selected else _LONG_ENTRIES
    tiles = ceil_div(keys, _KEY_TILE)
    return max(1, min(tiles, selection.sm_count // (selection.tokens * head_tiles)))


def _tiles_shared_bytes(head_tile: int, head_dim: int, planes: list[StatePlaneRows]) -> int:
    """Queries, keys and weights in bf16, the keys as they are stored, their exponents."""
    stride = ceil_div(head_dim, _WIDTH_ALIGN) * _WIDTH_ALIGN + _ROW_PAD
    raw = ceil_div(max(2 * head_dim, *(plane.row_bytes for plane in planes)), 16) * 16
    exponents = ceil_div(max(8, *(plane.exponent_bytes for plane in planes)), 8) * 8
    rows = 2 * (head_tile + _KEY_TILE) * stride + 2 * head_tile * (_KEY_TILE + _ROW_PAD)
    return rows + _KEY_TILE * (raw + exponents)


def _plain(launch: Launch, selection: Selection, constants: Constants, args: tuple[TensorRef, ...]) -> KernelCall:
    heads, width = tensor_arg(launch, 0).sizes[1:]
    shared_bytes = 4 * (32 * (width | 1) + _PLAIN_HEADS * width)
    if shared_bytes > selection.target.smem_per_block:
        raise PlanError(
            f"%{launch.name}: heads of {width} channels are too wide for {selection.target.arch}",
            hint="this version has attention kernels for narrower heads only",
        )
    variant = cuda_variant("attention_plain", "attention_plain", HEADS_OF_BLOCK=_PLAIN_HEADS, **constants)
    grid = (selection.tokens, ceil_div(heads, _PLAIN_HEADS), 1)
    return KernelCall(variant, grid, 32 * _PLAIN_HEADS, args, shared_bytes)


SELECTORS: dict[str, Selector] = {
    "attention": select_attention,
    "attention_unrotated": select_attention_unrotated,
    "commit_ring": select_commit_ring,
}
