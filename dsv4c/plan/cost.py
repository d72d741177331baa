"""Bytes moved and floating-point operations of a launch: the roofline of a step without running it.

Matrix products count two operations a multiply-add. Experts count as hit by uniform routing. Attention counts the full
window and the largest selection; the cost of an HCA layer's entries grows with the context and is not in here.
"""

import math
from collections.abc import Sequence

from dsv4c.plan.execution_plan import Arg, TensorRef
from dsv4c.plan.expert_hits import distinct_experts
from dsv4c.step_abi import DType, Space


def tensor_bytes(tensor: TensorRef) -> int:
    """Bytes of a tensor at the bucket's capacity, as it lies (a broadcast dimension counts once)."""
    count = math.prod(size for size, stride in zip(tensor.sizes, tensor.strides, strict=True) if stride != 0)
    return count * tensor.dtype.size_bytes


def _columns(weight: TensorRef) -> int:
    # Codes in U8 are INT4, two a byte.
    return weight.sizes[-1] * (2 if weight.dtype in (DType.F4E2M1X2, DType.U8) else 1)


def launch_cost(kernel: str, args: Sequence[Arg], outputs: Sequence[TensorRef]) -> tuple[int, int]:
    """(bytes moved, FLOPs) of one launch at the capacity of its bucket."""
    tensors = [arg for arg in args if isinstance(arg, TensorRef)]
    # State is read and written by rows, not as a whole: the kernels that use it say how much below.
    moved = sum(tensor_bytes(t) for t in (*tensors, *outputs) if t.space is not Space.STATE)
    match kernel:
        case "linear":
            x, weight = tensors[:2]
            return moved, 2 * x.sizes[0] * weight.sizes[0] * _columns(weight)
        case "grouped_linear":
            x, weight = tensors[:2]
            return moved, 2 * x.sizes[0] * weight.sizes[0] * _columns(weight)
        case "moe_ffn":
            return _moe_cost(tensors, outputs)
        case "placed_experts":
            return _placed_cost(args, outputs)
        case "attention" | "attention_unrotated":
            return _attention_cost(args, tensors, moved)
        case "select_entries":
            q, _, keys = tensors[:3]
            topk = args[7]
            assert isinstance(topk, int)
            rows = q.sizes[0] * topk
            return moved + rows * keys.sizes[-1] * keys.dtype.size_bytes, 2 * rows * math.prod(q.sizes[1:])
        case "count_routing":
            ids, counts = tensors
            return moved + 2 * math.prod(ids.sizes) * counts.dtype.size_bytes, 0
        case "mhc_mix" | "mhc_mix_norm" | "mhc_head":
            streams, fn = tensors[:2]
            return moved, 2 * streams.sizes[0] * math.prod(fn.sizes)
        case "embedding" | "route_hash" | "gather_rows":
            table = max(tensors, key=tensor_bytes)
            return moved - tensor_bytes(table) + sum(tensor_bytes(out) for out in outputs), 0
        case _:
            return moved, sum(math.prod(out.sizes) for out in outputs)


def _moe_cost(tensors: Sequence[TensorRef], outputs: Sequence[TensorRef]) -> tuple[int, int]:
    x, ids, weights, w13 = tensors[:4]
    tokens, k = ids.sizes
    experts = w13.sizes[0]
    stacks = list(tensors[3:])
    share = distinct_experts(experts, tokens, k) / experts
    moved = sum(tensor_bytes(t) for t in (x, ids, weights, *outputs)) + round(share * sum(map(tensor_bytes, stacks)))
    inner, hidden = w13.sizes[1] // 2, x.sizes[1]
    return moved, 2 * tokens * k * 3 * inner * hidden


def _placed_cost(args: Sequence[Arg], outputs: Sequence[TensorRef]) -> tuple[int, int]:
    x, logits, bias, table, token_ids, stack, topology, inner, k, *_ = args
    assert isinstance(x, TensorRef) and isinstance(stack, TensorRef) and isinstance(inner, int) and isinstance(k, int)
    tokens, hidden = x.sizes
    share = distinct_experts(stack.sizes[0], tokens, k) / stack.sizes[0]
    whole = (x, logits, bias, token_ids, topology, *outputs)
    moved = sum(tensor_bytes(t) for t in whole if isinstance(t, TensorRef)) + round(share * tensor_bytes(stack))
    if isinstance(table, TensorRef):
        moved += tokens * k * table.dtype.size_bytes
    return moved, 2 * tokens * k * 3 * inner * hidden


def _attention_cost(args: Sequence[Arg], tensors: Sequence[TensorRef], moved: int) -> tuple[int, int]:
    q, ring, selected, window = tensors[0], tensors[2], args[6], args[11]
    assert isinstance(window, int)
    keys = window + (selected.sizes[1] if isinstance(selected, TensorRef) else 0)
    tokens, heads, head_dim = q.sizes
    row = ring.sizes[-1] * ring.dtype.size_bytes
    return moved + tokens * keys * row, 4 * tokens * heads * keys * head_dim
