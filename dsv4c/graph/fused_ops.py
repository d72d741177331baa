"""`dsv4::` operators that stand for a few others in a row, for targets where a launch costs more than a call.

The passes that make them run for targets with CUDA kernels only (`passes/fuse_row_chain.py`, `fuse_mhc_norm.py`,
`fuse_attention_rope.py`). A reference body is the sequence it replaces: the same functions, rounded at the same places,
so the results are equal bit for bit.
"""

import enum

import torch
from torch import Tensor

from dsv4c.graph.ops import fp4_rounded, fp8_rounded, hadamard_transformed, mhc_mix, normalized, rotated
from dsv4c.graph.state_ops import attention


class RowRounding(enum.IntEnum):
    """How `row_chain` ends."""

    NONE = 0
    FP8 = 1  # fp8_round(group, width)
    FP4 = 2  # fp4_round(group)


@torch.library.custom_op("dsv4::row_chain", mutates_args=())
def row_chain(
    x: Tensor,
    weight: Tensor | None,
    positions: Tensor | None,
    inv_freq: Tensor | None,
    norm: bool,
    eps: float,
    inverse: bool,
    hadamard: bool,
    rounding: int,
    group: int,
    width: int,
) -> Tensor:
    """In this order: rms_norm(weight, eps) if `norm`, rope(positions, inv_freq, inverse) if there are frequencies,
    hadamard, fp8_round(group, width) or fp4_round(group) as `rounding` says (`RowRounding`); at least one of them.

    x [T, W] or [T, H, W]; every step is rounded to the dtype of x, as the operator of its own does.
    """
    dtype = x.dtype
    if norm:
        x = normalized(x, weight, eps).to(dtype)
    if inv_freq is not None:
        assert positions is not None
        x = rotated(x, positions, inv_freq, inverse).to(dtype)
    if hadamard:
        x = hadamard_transformed(x).to(dtype)
    if rounding == RowRounding.FP8:
        x = fp8_rounded(x, group, width).to(dtype)
    elif rounding == RowRounding.FP4:
        x = fp4_rounded(x, group).to(dtype)
    return x


@row_chain.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,
    positions: Tensor | None,
    inv_freq: Tensor | None,
    norm: bool,
    eps: float,
    inverse: bool,
    hadamard: bool,
    rounding: int,
    group: int,
    width: int,
) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("dsv4::mhc_mix_norm", mutates_args=())
def mhc_mix_norm(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`mhc_mix`, then rms_norm(norm_weight [D], eps) of its collapsed input: (normed [T, D], post, comb).

    `norm_eps` is the mixer's. The collapsed input is rounded to the dtype of the streams before the norm.
    """
    collapsed, post, comb = mhc_mix(streams, fn, scale, base, iterations, hc_eps, norm_eps)
    return normalized(collapsed, norm_weight, eps).to(streams.dtype), post, comb


@mhc_mix_norm.register_fake
def _(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, n, hidden = streams.shape
    return (
        streams.new_empty((rows, hidden)),
        streams.new_empty((rows, n), dtype=torch.float32),
        streams.new_empty((rows, n, n), dtype=torch.float32),
    )


@torch.library.custom_op("dsv4::attention_unrotated", mutates_args=())
def attention_unrotated(
    q: Tensor,
    kv: Tensor,
    ring: Tensor,
    ring_scales: Tensor | None,
    entries: Tensor | None,
    entry_scales: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
    slots: Tensor,
    positions: Tensor,
    block_table: Tensor,
    window: int,
    ratio: int,
    rotary_dim: int,
    scale: float,
    inv_freq: Tensor,
) -> Tensor:
    """`attention`, then rope(positions, inv_freq, inverse) of its result, rounded in between: [T, H, hd]."""
    out = attention(
        q,
        kv,
        ring,
        ring_scales,
        entries,
        entry_scales,
        selected,
        sink,
        slots,
        positions,
        block_table,
        window,
        ratio,
        rotary_dim,
        scale,
    )
    return rotated(out, positions, inv_freq, True).to(q.dtype)


@attention_unrotated.register_fake
def _(
    q: Tensor,
    kv: Tensor,
    ring: Tensor,
    ring_scales: Tensor | None,
    entries: Tensor | None,
    entry_scales: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
    slots: Tensor,
    positions: Tensor,
    block_table: Tensor,
    window: int,
    ratio: int,
    rotary_dim: int,
    scale: float,
    inv_freq: Tensor,
) -> Tensor:
    return q.new_empty(q.shape)
