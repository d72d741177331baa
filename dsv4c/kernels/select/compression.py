"""Compressed entries and the indexer's choice among them."""

from dsv4c.errors import PlanError
from dsv4c.kernels.select.selection import (
    CUDA_TYPES,
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

# As in cuda/select.cu and cuda/select_merge.cu.
_THREADS = 256
_CHUNK = 1024
_MERGE_THREADS = 1024
_MERGE_CHUNK = 4 * _MERGE_THREADS
_CANDIDATE_BYTES = 8
# Chunks beside the best entries, before these are chosen anew.
_HELD_CHUNKS = 4
# Candidates that a merge can hold: most of a block's shared memory.
_MERGE_CAPACITY = 24576
_STATIC_BYTES = 2048
_TENSOR_CORE_WIDTHS = (32, 64, 128)


def select_compress(launch: Launch, selection: Selection) -> list[KernelCall]:
    kv, gate, ape, weight = (tensor_arg(launch, index) for index in range(4))
    inv_freq, state = tensor_arg(launch, 4), tensor_arg(launch, 8)
    entries = state_plane(tensor_arg(launch, 9), optional_tensor(launch, 10))
    ratio, overlap = int_arg(launch, 11), bool(int_arg(launch, 12))
    width, depth = weight.sizes[0], state.sizes[1]
    assert state.dtype is DType.F32 and kv.strides[1] == gate.strides[1] == 1
    constants: dict[str, int | float | str] = {
        "WIDTH": width,
        "PROJECTED": kv.sizes[1],
        "RATIO": ratio,
        "OVERLAP": int(overlap),
        "DEPTH": depth,
        "KV_TYPE": cuda_type(kv),
        "KV_STRIDE": kv.strides[0],
        "GATE_TYPE": cuda_type(gate),
        "GATE_STRIDE": gate.strides[0],
        "BIAS_TYPE": cuda_type(ape),
        "BIAS_STRIDE": ape.strides[0],
        "WEIGHT_TYPE": cuda_type(weight),
        "EPS": float_arg(launch, 13),
        "HADAMARD_SCALE": width**-0.5,
        "ROTARY": 2 * inv_freq.sizes[0],
        "ROUNDING": int_arg(launch, 14),
        "ROUND_TYPE": CUDA_TYPES[DType(int_arg(launch, 15))],
        "BLOCK_WARPS": min(16, max(4, ceil_div(width, 32))),
        **_plane_constants(entries),
    }
    args = (kv, gate, ape, weight, inv_freq, *(tensor_arg(launch, index) for index in (5, 6, 7)))
    args += (state, entries.rows, entries.exponents)

    def call(pool: bool, remember: bool) -> KernelCall:
        variant = cuda_variant("compress", "compress", POOL=int(pool), REMEMBER=int(remember), **constants)
        return KernelCall(variant, (selection.tokens, 1, 1), 32 * int(constants["BLOCK_WARPS"]), args)

    # A group that is open when the step begins has tokens as old as its span before the step. In a step no longer than
    # the other rows of the state nobody takes their place, so pooling and remembering need no order.
    span = ratio * (2 if overlap else 1)
    if selection.tokens <= depth - span + 1:
        return [call(pool=True, remember=True)]
    return [call(pool=True, remember=False), call(pool=False, remember=True)]


def select_select_entries(launch: Launch, selection: Selection) -> list[KernelCall]:
    q, weights = tensor_arg(launch, 0), tensor_arg(launch, 1)
    keys = state_plane(tensor_arg(launch, 2), optional_tensor(launch, 3))
    slots, positions, table = (tensor_arg(launch, index) for index in (4, 5, 6))
    topk, ratio = int_arg(launch, 7), int_arg(launch, 8)
    heads, width = q.sizes[1:]
    plain = not _fits_tensor_cores(q, keys)
    capacity = topk + _HELD_CHUNKS * _CHUNK
    shared_bytes = 4 * _CHUNK + _CANDIDATE_BYTES * capacity + (4 * heads * (width + 1) if plain else 0)
    splits = max(1, selection.sm_count // selection.tokens)
    # Fewer entries for a split would leave it no choice.
    share = max(_CHUNK, ceil_div(2 * topk, 8) * 8)
    ends = {"TOPK": topk, "RATIO": ratio, "OUT_STRIDE": launch.outputs[0].strides[0], "SPLIT_ENTRIES": share}
    variant = cuda_variant(
        "select",
        "select_entries",
        HEADS=heads,
        DIM=width,
        Q_TYPE=cuda_type(q),
        Q_STRIDE=q.strides[0],
        Q_HEAD_STRIDE=q.strides[1],
        Q_VECTORS=int(q.offset % 16 == 0 and all(2 * stride % 16 == 0 for stride in q.strides[:2])),
        FACTOR_TYPE=cuda_type(weights),
        FACTOR_STRIDE=weights.strides[0],
        SCALE=float_arg(launch, 9),
        FLOAT_MATH=int(plain),
        CAPACITY=capacity,
        SPLIT=int(splits > 1),
        **ends,
        **_plane_constants(keys),
    )
    args = (q, weights, keys.rows, keys.exponents, slots, positions, table)
    grid = (selection.tokens, splits, 1)
    if splits == 1:
        return _checked(launch, selection, KernelCall(variant, grid, _THREADS, (*args, *launch.outputs), shared_bytes))
    candidates = tuple(selection.scratch(DType.I32, selection.tokens, splits, topk) for _ in range(2))
    all_candidates = ceil_div(splits * topk, _MERGE_CHUNK) * _MERGE_CHUNK
    held = max(min(all_candidates, _MERGE_CAPACITY), topk + _MERGE_CHUNK)
    merge = cuda_variant("select_merge", "select_merge", SPLITS=splits, CAPACITY=held, **ends)
    merge_args = (*candidates, positions, *launch.outputs)
    return _checked(
        launch,
        selection,
        KernelCall(variant, grid, _THREADS, (*args, *candidates), shared_bytes),
        KernelCall(merge, (selection.tokens, 1, 1), _MERGE_THREADS, merge_args, _CANDIDATE_BYTES * held),
    )


def _plane_constants(plane: StatePlaneRows) -> dict[str, int | float | str]:
    return {
        "FORMAT": plane.format,
        "BLOCK_ROWS": plane.per_unit,
        "ROW_BYTES": plane.row_bytes,
        "EXPONENT_BYTES": plane.exponent_bytes,
    }


def _fits_tensor_cores(q: TensorRef, keys: StatePlaneRows) -> bool:
    return (
        q.dtype is DType.BF16
        and q.sizes[2] in _TENSOR_CORE_WIDTHS
        and keys.format in {"STATE_BF16", "STATE_E2M1", "STATE_E4M3"}
        and keys.aligned(16, 1)
    )


def _checked(launch: Launch, selection: Selection, *calls: KernelCall) -> list[KernelCall]:
    """The calls, once their shared memory is found to fit beside what they declare themselves."""
    if any(call.shared_bytes + _STATIC_BYTES > selection.target.smem_per_block for call in calls):
        heads, width = tensor_arg(launch, 0).sizes[1:]
        raise PlanError(
            f"%{launch.name}: {selection.target.arch} cannot choose {int_arg(launch, 7)} entries by {heads} heads of "
            f"{width} channels",
            hint="the kernels hold all of them in the shared memory of a block",
        )
    return list(calls)


SELECTORS: dict[str, Selector] = {
    "compress": select_compress,
    "select_entries": select_select_entries,
}
