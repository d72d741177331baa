"""The `dsv4::` operators of the router and the routed experts; see `ops.py` for what holds for all.

`placed_experts` is both in one, over packed weights: the pass `place_experts` makes it for targets whose kernels do so.
Its body is the sequence that it replaces, so the results are equal bit for bit.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4c.checkpoint.expert_packing import FP4_BLOCK, FP8_BLOCK, unpack_fp4, unpack_fp8
from dsv4c.graph.ops import clamped_swiglu, decode_weight, fp8_rounded

# Channels of an activation that share a scale: 128, as in every model of the family (spec 2.9).
ACT_GROUP = 128


def _route(scores: Tensor, ids: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    weights = scores.gather(1, ids)
    return ids.to(torch.int32), weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale


@torch.library.custom_op("dsv4::route_topk", mutates_args=())
def route_topk(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """The k experts of largest sqrt(softplus(logits)) + bias, and their weights (spec 2.11).

    logits float32 [T, E], bias float32 [E]. Returns ids int32 [T, k] (best first, ties to the lower id) and float32
    weights [T, k] that sum to `scale`. The bias takes part in the selection only.
    """
    scores = torch.nn.functional.softplus(logits.float()).sqrt()
    order = (scores + bias.float()).sort(dim=1, descending=True, stable=True).indices
    return _route(scores, order[:, :k], scale)


@route_topk.register_fake
def _(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("dsv4::route_hash", mutates_args=())
def route_hash(logits: Tensor, table: Tensor, token_ids: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Experts by token id: row token_ids[t] of table int64 [V, k]; weights from the logits as in `route_topk`."""
    scores = torch.nn.functional.softplus(logits.float()).sqrt()
    return _route(scores, table[token_ids.long()], scale)


@route_hash.register_fake
def _(logits: Tensor, table: Tensor, token_ids: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], table.shape[1])
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("dsv4::count_routing", mutates_args=("counts",))
def count_routing(ids: Tensor, counts: Tensor) -> None:
    """Add to counts int64 [1, E] how often each expert is among ids int32 [T, k], once for each choice of each row."""
    counts += torch.bincount(ids.flatten(), minlength=counts.shape[1])


@count_routing.register_fake
def _(ids: Tensor, counts: Tensor) -> None:
    return None


def weighted_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    matrices: Callable[[int], tuple[Tensor, Tensor]],
    limit: float,
    act_group: int,
) -> Tensor:
    """What `moe_ffn` computes; `matrices` gives float32 w13 [2I, D] and w2 [D, I] of an expert."""
    parts = x.new_zeros((*ids.shape, x.shape[1]), dtype=torch.float32)
    rounded = fp8_rounded(x, act_group, x.shape[1]).to(x.dtype) if act_group else x
    for expert in sorted(set(ids.flatten().tolist())):
        rows, choices = torch.where(ids == expert)
        w13, w2 = matrices(expert)
        gate, up = (rounded[rows].float() @ w13.T).chunk(2, -1)
        h = (clamped_swiglu(gate, up, limit) * weights[rows, choices].unsqueeze(-1)).to(x.dtype)
        if act_group:
            h = fp8_rounded(h, act_group, h.shape[1]).to(x.dtype)
        parts[rows, choices] = h.float() @ w2.T
    out = parts.new_zeros(x.shape)
    for choice in range(ids.shape[1]):
        out += parts[:, choice]
    return out


@torch.library.custom_op("dsv4::moe_ffn", mutates_args=())
def moe_ffn(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scales: Tensor | None,
    w2: Tensor,
    w2_scales: Tensor | None,
    block_rows: int,
    block_cols: int,
    limit: float,
    act_group: int,
) -> Tensor:
    """The routed experts: sum over the k choices of w2_e(weight * silu(w1_e x) * (w3_e x)), float32 [T, D].

    x [T, D]; ids int32 and weights float32 [T, k]; w13 [E, 2I, D] (w1 rows, then w3 rows) and w2 [E, D, I] in a format
    of `decode_weight`, scales with a leading E. `act_group` > 0: the input and the product are rounded to e4m3 per
    `act_group` channels before their projection (spec 2.9). The product is rounded to the dtype of x before w2; the
    sum runs in the order of the choices.
    """

    def matrices(expert: int) -> tuple[Tensor, Tensor]:
        scales13 = None if w13_scales is None else w13_scales[expert]
        scales2 = None if w2_scales is None else w2_scales[expert]
        return (
            decode_weight(w13[expert], scales13, block_rows, block_cols),
            decode_weight(w2[expert], scales2, block_rows, block_cols),
        )

    return weighted_experts(x, ids, weights, matrices, limit, act_group)


@moe_ffn.register_fake
def _(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scales: Tensor | None,
    w2: Tensor,
    w2_scales: Tensor | None,
    block_rows: int,
    block_cols: int,
    limit: float,
    act_group: int,
) -> Tensor:
    return x.new_empty((x.shape[0], w2.shape[1]), dtype=torch.float32)


@torch.library.custom_op("dsv4::placed_experts", mutates_args=())
def placed_experts(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    token_ids: Tensor | None,
    experts: Tensor,
    topology: Tensor | None,
    inner: int,
    k: int,
    scale: float,
    limit: float,
    group_sms: int,
) -> Tensor:
    """The k experts of every row and their weighted sum, float32 [T, D].

    x bfloat16 [T, D]; logits float32 [T, E]. With `bias` [E] the choice is that of `route_topk`, with `table` int64
    [V, k] and `token_ids` int32 [T] that of `route_hash`. `experts` [E, record bytes] are the packed matrices
    (`checkpoint/expert_packing.py`), of type float4_e2m1fn_x2 or float8_e4m3fn; inputs and products are rounded to e4m3
    per 128 channels, as in `moe_ffn`. `topology` says where an expert is computed, not what: int32 [products, row], one
    `Topology.table` for each SM count of the target, in groups of at least `group_sms` SMs; none: by all SMs (0).
    """
    if bias is not None:
        ids, weights = route_topk(logits, bias, k, scale)
    else:
        assert table is not None and token_ids is not None and table.shape[1] == k
        ids, weights = route_hash(logits, table, token_ids, scale)
    fp8 = experts.dtype == torch.float8_e4m3fn
    unpack, block = (unpack_fp8, FP8_BLOCK) if fp8 else (unpack_fp4, FP4_BLOCK)
    records = experts.view(torch.uint8)

    def matrices(expert: int) -> tuple[Tensor, Tensor]:
        gate, up, down = (decode_weight(*part, *block) for part in unpack(records[expert], x.shape[1], inner))
        return torch.cat([gate, up]), down

    return weighted_experts(x, ids, weights, matrices, limit, ACT_GROUP)


@placed_experts.register_fake
def _(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    token_ids: Tensor | None,
    experts: Tensor,
    topology: Tensor | None,
    inner: int,
    k: int,
    scale: float,
    limit: float,
    group_sms: int,
) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)
