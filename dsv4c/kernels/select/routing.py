"""The router's choices, their counts, and the sampling."""

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
from dsv4c.plan.execution_plan import KernelCall, KernelVariant, Launch

_LANES = 32
# Choices that a block counts, and `THREADS` in count_routing.cu.
_COUNTED_PAIRS, _COUNTING_THREADS = 1024, 256
# `THREADS` and the size of `Shared` in sample.cu.
_SAMPLE_THREADS = 1024
_SAMPLE_SHARED = 66 << 10


def select_route_topk(launch: Launch, selection: Selection) -> list[KernelCall]:
    logits, bias = tensor_arg(launch, 0), tensor_arg(launch, 1)
    variant = cuda_variant(
        "routing",
        "route_topk",
        EXPERTS=logits.sizes[1],
        LOGITS_STRIDE=logits.strides[0],
        CHOSEN=int_arg(launch, 2),
        SCALE=float_arg(launch, 3),
        BIASED=1,
        BIAS_TYPE=cuda_type(bias),
        WARPS=_warps(selection),
    )
    return [_call(launch, selection, variant, 2)]


def select_route_hash(launch: Launch, selection: Selection) -> list[KernelCall]:
    logits, table = tensor_arg(launch, 0), tensor_arg(launch, 1)
    variant = cuda_variant(
        "routing",
        "route_hash",
        EXPERTS=logits.sizes[1],
        LOGITS_STRIDE=logits.strides[0],
        CHOSEN=table.sizes[1],
        SCALE=float_arg(launch, 3),
        BIASED=0,
        WARPS=_warps(selection),
    )
    return [_call(launch, selection, variant, 3)]


def select_count_routing(launch: Launch, selection: Selection) -> list[KernelCall]:
    ids, counts = tensor_arg(launch, 0), tensor_arg(launch, 1)
    chosen = ids.sizes[1]
    assert ids.strides == (chosen, 1) and counts.strides[1] == 1, launch.name
    variant = cuda_variant(
        "count_routing", "count_routing", EXPERTS=counts.sizes[1], CHOSEN=chosen, PAIRS=_COUNTED_PAIRS
    )
    blocks = ceil_div(selection.tokens * chosen, _COUNTED_PAIRS)
    return [KernelCall(variant, grid=(blocks, 1, 1), block=_COUNTING_THREADS, args=(ids, counts))]


def _warps(selection: Selection) -> int:
    """Rows a block: one while every row can have an SM of its own."""
    return 1 if selection.tokens <= selection.sm_count else 8


def _call(launch: Launch, selection: Selection, variant: KernelVariant, operands: int) -> KernelCall:
    warps = _warps(selection)
    args = (*(tensor_arg(launch, index) for index in range(operands)), *launch.outputs)
    return KernelCall(variant, grid=(ceil_div(selection.tokens, warps), 1, 1), block=warps * _LANES, args=args)


def select_sample(launch: Launch, selection: Selection) -> list[KernelCall]:
    operands = [tensor_arg(launch, index) for index in range(7)]
    logits, mask = operands[0], optional_tensor(launch, 7)
    vocab, stride = logits.sizes[1], logits.strides[0]
    variant = cuda_variant(
        "sample",
        "sample",
        VOCAB=vocab,
        LOGITS_STRIDE=stride,
        VECTOR=1 if vocab % 4 or stride % 4 or logits.offset % 16 else 4,
        MASKED=int(mask is not None),
        MASK_WORDS=mask.strides[0] if mask else 0,
        SHARED_BYTES=_SAMPLE_SHARED,
    )
    return [
        KernelCall(
            variant,
            grid=(selection.tokens, 1, 1),
            block=_SAMPLE_THREADS,
            args=(*operands, *([mask] if mask else []), *launch.outputs),
            shared_bytes=_SAMPLE_SHARED,
        )
    ]


SELECTORS: dict[str, Selector] = {
    "route_topk": select_route_topk,
    "route_hash": select_route_hash,
    "count_routing": select_count_routing,
    "sample": select_sample,
}
