"""The hyper-connections: mixing logits (on tensor cores where X is bf16), what is made of them, and the combine."""

from dsv4c.kernels.select.selection import (
    Selection,
    Selector,
    ceil_div,
    cuda_type,
    cuda_variant,
    float_arg,
    int_arg,
    tensor_arg,
)
from dsv4c.plan.execution_plan import KernelCall, Launch, TensorRef
from dsv4c.step_abi import Dim, DType

_LANES = 32
_LOGITS_WARPS = 4
_STEP = 32  # of the depth, for a warp of mhc_logits
_PLAIN_WARPS = 8
_STATIC_SHARED = 48 << 10
# Buckets of steps whose time is latency.
_EAGER_TOKENS = 64
# Elements of a result that a thread of mhc_finish holds at most.
_HELD = 32


def select_mhc_mix(launch: Launch, selection: Selection) -> list[KernelCall]:
    return _mixer(launch, selection, iterations=4)


def select_mhc_mix_norm(launch: Launch, selection: Selection) -> list[KernelCall]:
    return _mixer(launch, selection, iterations=5, norm_weight=tensor_arg(launch, 4), eps=float_arg(launch, 8))


def _mixer(
    launch: Launch, selection: Selection, iterations: int, norm_weight: TensorRef | None = None, eps: float = 0.0
) -> list[KernelCall]:
    """`iterations` is the argument that says how many; the mixer's two epsilons follow it."""
    constants = {
        "MIXER": 1,
        "ITERATIONS": int_arg(launch, iterations),
        "HC_EPS": float_arg(launch, iterations + 1),
        "NORM_EPS": float_arg(launch, iterations + 2),
        "EPS": eps,
    }
    return _collapse(launch, selection, constants, norm_weight)


def select_mhc_head(launch: Launch, selection: Selection) -> list[KernelCall]:
    constants = {
        "MIXER": 0,
        "ITERATIONS": 0,
        "HC_EPS": float_arg(launch, 4),
        "NORM_EPS": float_arg(launch, 5),
        "EPS": 0.0,
    }
    return _collapse(launch, selection, constants, None)


def _collapse(
    launch: Launch, selection: Selection, constants: dict[str, int | float], norm_weight: TensorRef | None
) -> list[KernelCall]:
    """The logits in parts, then everything that is made of them."""
    streams, fn, scale, base = (tensor_arg(launch, index) for index in range(4))
    logits = fn.sizes[0]
    plain = not _takes_tensor_cores(streams, fn)
    rows = _rows_per_block(selection.tokens, logits, plain)
    tiles = ceil_div(selection.tokens, rows)
    depth = fn.sizes[1]
    splits = _splits(selection, tiles, ceil_div(depth, 256 if plain else _LOGITS_WARPS * _STEP))
    partial = selection.scratch(DType.F32, selection.tokens, splits, logits + 1)
    common = {
        **_shape(streams),
        "MIX_LOGITS": logits,
        "SPLITS": splits,
        "CAPACITY": selection.tokens,
        "EAGER": int(selection.tokens <= _EAGER_TOKENS),
    }
    if plain:
        variant = cuda_variant("mhc_logits_plain", "mhc_logits_plain", **common, FN_TYPE=cuda_type(fn), ROWS=rows)
    else:
        variant = cuda_variant("mhc_logits", "mhc_logits", **common, FN_TYPE=cuda_type(fn), ROW_TILES=rows // 16)
    first = KernelCall(
        variant,
        grid=(splits, tiles, 1),
        block=(_PLAIN_WARPS if plain else _LOGITS_WARPS) * _LANES,
        args=(streams, fn, partial),
    )

    collapsed = launch.outputs[0]
    vector = _vector(streams, collapsed, *([norm_weight] if norm_weight else []))
    eager = selection.tokens <= _EAGER_TOKENS
    threads = _finish_threads(streams, vector, eager)
    warps = threads // _LANES
    # Warps that add up the parts of one row's gates.
    group = max(size for size in range(1, warps + 1) if warps % size == 0 and size <= max(1, splits // 4))
    gate_blocks = ceil_div(selection.tokens, warps // group) if constants["MIXER"] else 0
    finish = cuda_variant(
        "mhc_finish",
        "mhc_finish",
        **common,
        **constants,
        SCALE_TYPE=cuda_type(scale),
        BASE_TYPE=cuda_type(base),
        NORM_TYPE=cuda_type(norm_weight) if norm_weight else "float",
        NORM=int(norm_weight is not None),
        VECTOR=vector,
        THREADS=threads,
        GATE_BLOCKS=gate_blocks,
        GROUP_WARPS=group,
    )
    weights = (scale, base, norm_weight) if norm_weight else (scale, base)
    second = KernelCall(
        finish,
        grid=(gate_blocks + selection.tokens, 1, 1),
        block=threads,
        args=(streams, partial, *weights, *launch.outputs),
    )
    return [first, second]


def _takes_tensor_cores(streams: TensorRef, fn: TensorRef) -> bool:
    width = streams.sizes[2]
    aligned = _multiple_of(streams, 8) and width % 8 == 0 and fn.offset % 16 == 0
    return streams.dtype is DType.BF16 and fn.dtype in (DType.F32, DType.BF16) and aligned


def _rows_per_block(capacity: int, logits: int, plain: bool) -> int:
    if plain:
        return 4 if capacity >= 16 else 1
    # fn is read once for all rows of a block; what its warps found is put together in shared memory.
    fitting = [tiles for tiles in (1, 2, 4) if _LOGITS_WARPS * 16 * tiles * (logits + 1) * 4 <= _STATIC_SHARED]
    return 16 * next((tiles for tiles in fitting if 16 * tiles >= capacity), fitting[-1])


def _splits(selection: Selection, tiles: int, most: int) -> int:
    """Blocks that share the depth: one an SM where fn is what takes time, as many as fit there where X is."""
    blocks = selection.sm_count * (1 if tiles == 1 else 4)
    return max(1, min(blocks // tiles, most))


def _finish_threads(streams: TensorRef, vector: int, eager: bool) -> int:
    """Threads of a row: many where the row is waited for, else few, as long as they can hold it."""
    pieces = streams.sizes[2] // vector
    threads = next((size for size in (512, 1024) if ceil_div(pieces, size) <= 2), 1024)
    if not eager:
        threads = next((size for size in (128, 256, 512) if ceil_div(pieces, size) * vector <= _HELD), 1024)
    return min(threads, ceil_div(pieces, _LANES) * _LANES)


def select_mhc_combine(launch: Launch, selection: Selection) -> list[KernelCall]:
    y, streams, post, comb = (tensor_arg(launch, index) for index in range(4))
    (out,) = launch.outputs
    vector = _vector(y, streams, out)
    pieces = ceil_div(streams.sizes[2], vector)
    # Few rows: small blocks, so that there are more of them.
    threads = min(64 if selection.tokens <= 64 else 256, ceil_div(pieces, _LANES) * _LANES)
    variant = cuda_variant(
        "mhc_combine",
        "mhc_combine",
        **_shape(streams),
        Y_TYPE=cuda_type(y),
        Y_STRIDE=y.strides[0],
        VECTOR=vector,
        THREADS=threads,
    )
    grid = (ceil_div(pieces, threads), selection.tokens, 1)
    return [KernelCall(variant, grid, threads, args=(y, streams, post, comb, out))]


def _shape(streams: TensorRef) -> dict[str, int | str]:
    """The macros of mhc.cuh."""
    _, n, width = streams.sizes
    return {
        "STREAMS": n,
        "WIDTH": width,
        "X_TYPE": cuda_type(streams),
        "ROW_STRIDE": streams.strides[0],
        "STREAM_STRIDE": streams.strides[1],
        "HEAD": int(streams.dims[0] is Dim.LOGITS),
    }


def _multiple_of(tensor: TensorRef, elements: int) -> bool:
    """Whether every row of the tensor starts on a load of that many elements."""
    unit = min(16, elements * tensor.dtype.size_bytes)
    return tensor.offset % unit == 0 and all(stride % elements == 0 for stride in tensor.strides[:-1])


def _vector(*tensors: TensorRef) -> int:
    """Elements that all of them can be loaded by at once: 16 bytes of the narrowest, or one."""
    elements = 16 // min(tensor.dtype.size_bytes for tensor in tensors)
    width = tensors[0].sizes[-1]
    fits = width % elements == 0 and all(_multiple_of(tensor, elements) for tensor in tensors)
    return elements if fits else 1


SELECTORS: dict[str, Selector] = {
    "mhc_mix": select_mhc_mix,
    "mhc_mix_norm": select_mhc_mix_norm,
    "mhc_combine": select_mhc_combine,
    "mhc_head": select_mhc_head,
}
