"""The `dsv4::` operators without state: schema, reference body, fake.

A reference body is the definition of its operator: plain torch in fp32, rounded once where the schema says so. Every
kernel of every target is compared with it. Shapes use T (token rows of the step), R (rows that want logits), E
(experts), k (experts per token), n (mHC streams), D (hidden size); T and R may be 0, so no body leaves a size beside
them to torch (-1). Formula numbers are those of the model specification that the README names.

Row-wise activations may be float32 (`exact` numerics) or bfloat16 (`reference` numerics): a body computes in float32
and rounds its result to the dtype of its main input, or to `dtype` where that is an argument.

The operators with state (KV ring, compressed entries, open groups) are in `state_ops.py`, router and experts in
`expert_ops.py`.
"""

import math

import torch
from torch import Tensor

from dsv4c.checkpoint.formats import dequantize_fp4, dequantize_fp8, dequantize_int4, dequantize_int8

FP8_MAX = 448.0
FP4_MAX = 6.0
# Smallest absolute maxima that the reference program quantises with (spec 2.9).
FP8_AMAX_FLOOR = 1e-4
FP4_AMAX_FLOOR = FP4_MAX * 2.0**-126


def decode_weight(weight: Tensor, scales: Tensor | None, block_rows: int, block_cols: int) -> Tensor:
    """Float32 values of a stored matrix [O, I].

    `weight` is float32, bfloat16, float8_e4m3fn [O, I] with `scales` [ceil(O/block_rows), ceil(I/block_cols)]
    (float8_e8m0fnu or float32), float4_e2m1fn_x2 [O, I/2] with `scales` [O, I/32], or, with float16 `scales`
    [O, I/block_cols], int8 [O, I] or uint8 [O, I/2]: two's-complement codes of 4 bits, the low nibble first.
    """
    if scales is None:
        return weight.float()
    if scales.dtype == torch.float16:
        return dequantize_int8(weight, scales) if weight.dtype == torch.int8 else dequantize_int4(weight, scales)
    if weight.dtype == torch.float8_e4m3fn:
        return dequantize_fp8(weight, scales, (block_rows, block_cols))
    return dequantize_fp4(weight.view(torch.uint8), scales)


def _power_of_two_scale(amax: Tensor, limit: float) -> Tensor:
    """2^ceil(log2(amax / limit)), exactly: log2 in floating point is off by one ulp near powers of two."""
    mantissa, exponent = torch.frexp(amax / limit)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(amax), exponent)


def _in_groups(x: Tensor, group: int) -> Tensor:
    """[..., W] -> [..., ceil(W/group), group], the last group padded with zeros."""
    width = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -width % group))
    return padded.reshape(*padded.shape[:-1], padded.shape[-1] // group, group)


def quantize_fp8_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """e4m3 codes [..., W] and power-of-two scales float32 [..., ceil(W/group)] of `x` (spec 2.9)."""
    grouped = _in_groups(x.float(), group)
    amax = grouped.abs().amax(-1).clamp(min=FP8_AMAX_FLOOR)
    scale = _power_of_two_scale(amax, FP8_MAX)
    codes = (grouped / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).flatten(-2)[..., : x.shape[-1]].view(torch.float8_e4m3fn), scale


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 value, ties to the even code; |x| <= 6."""
    magnitude = x.abs()
    # The step is 0.5 below 2, 1 below 4, 2 above; torch.round rounds ties to even, as the codes do.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign((magnitude / step).round() * step, x)


def quantize_fp4_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """e2m1 values (float32, before scaling) [..., W] and power-of-two scales [..., ceil(W/group)] (spec 2.9)."""
    grouped = _in_groups(x.float(), group)
    amax = grouped.abs().amax(-1).clamp(min=FP4_AMAX_FLOOR)
    scale = _power_of_two_scale(amax, FP4_MAX)
    values = round_e2m1((grouped / scale.unsqueeze(-1)).clamp(-FP4_MAX, FP4_MAX))
    return values.flatten(-2)[..., : x.shape[-1]], scale


def expand_groups(scales: Tensor, group: int, width: int) -> Tensor:
    """[..., G] -> [..., width]: each scale repeated over its group."""
    return scales.repeat_interleave(group, -1)[..., :width]


def fp8_rounded(x: Tensor, group: int, width: int) -> Tensor:
    """`x` with its first `width` channels rounded to e4m3 in groups, float32."""
    codes, scale = quantize_fp8_groups(x[..., :width], group)
    rounded = codes.float() * expand_groups(scale, group, width)
    return torch.cat([rounded, x[..., width:].float()], -1)


def fp4_rounded(x: Tensor, group: int) -> Tensor:
    """`x` rounded to e2m1 in groups, float32."""
    values, scale = quantize_fp4_groups(x, group)
    return values * expand_groups(scale, group, x.shape[-1])


def rotated(x: Tensor, positions: Tensor, inv_freq: Tensor, inverse: bool) -> Tensor:
    """Interleaved rotary embedding of the last 2*len(inv_freq) channels, float32 (spec 2.5).

    x [T, ..., W], positions int32 [T], inv_freq float32 [rotary/2].
    """
    half = inv_freq.shape[0]
    angle = positions.float().unsqueeze(-1) * inv_freq
    angle = angle.reshape(angle.shape[0], *[1] * (x.dim() - 2), half)
    cos, sin = angle.cos(), angle.sin()
    if inverse:
        sin = -sin
    x = x.float()
    plain, tail = x[..., : x.shape[-1] - 2 * half], x[..., x.shape[-1] - 2 * half :]
    even, odd = tail[..., 0::2], tail[..., 1::2]
    tail = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat([plain, tail], -1)


def hadamard_transformed(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the last axis (a power of two), scaled by width^-0.5, float32."""
    width = x.shape[-1]
    y = x.float()
    span = 1
    while span < width:
        pairs = y.reshape(*y.shape[:-1], width // (2 * span), 2, span)
        y = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
        span *= 2
    return y * (1 / math.sqrt(width))


def normalized(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis, float32 (spec 2.3)."""
    x = x.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.float()


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) (spec 2.11)."""
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


@torch.library.custom_op("dsv4::embedding", mutates_args=())
def embedding(token_ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of `table` [V, D] for int32 `token_ids` [T], as `dtype` [T, D]."""
    return table[token_ids.long()].to(dtype)


@embedding.register_fake
def _(token_ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    return table.new_empty((token_ids.shape[0], table.shape[1]), dtype=dtype)


@torch.library.custom_op("dsv4::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis; weight [W] or none. One rounding, to the dtype of `x`."""
    return normalized(x, weight, eps).to(x.dtype)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("dsv4::fp8_round", mutates_args=())
def fp8_round(x: Tensor, group: int, width: int) -> Tensor:
    """Round the first `width` channels through e4m3 with one power-of-two scale per `group` (spec 2.9)."""
    return fp8_rounded(x, group, width).to(x.dtype)


@fp8_round.register_fake
def _(x: Tensor, group: int, width: int) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("dsv4::fp4_round", mutates_args=())
def fp4_round(x: Tensor, group: int) -> Tensor:
    """Round the last axis through e2m1 with one power-of-two scale per `group`, ties to even (spec 2.9)."""
    return fp4_rounded(x, group).to(x.dtype)


@fp4_round.register_fake
def _(x: Tensor, group: int) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("dsv4::hadamard", mutates_args=())
def hadamard(x: Tensor) -> Tensor:
    """Normalised Walsh-Hadamard transform of the last axis, whose size is a power of two (spec 2.8)."""
    return hadamard_transformed(x).to(x.dtype)


@hadamard.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("dsv4::rope", mutates_args=())
def rope(x: Tensor, positions: Tensor, inv_freq: Tensor, inverse: bool) -> Tensor:
    """Rotate the last 2*len(inv_freq) channels of x [T, W] or [T, H, W] by the row's position (spec 2.5)."""
    return rotated(x, positions, inv_freq, inverse).to(x.dtype)


@rope.register_fake
def _(x: Tensor, positions: Tensor, inv_freq: Tensor, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("dsv4::linear", mutates_args=())
def linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, block_rows: int, block_cols: int, dtype: torch.dtype
) -> Tensor:
    """x [T, I] times the stored matrix [O, I] transposed, accumulated in float32, as `dtype` [T, O].

    Weight formats: see `decode_weight`; block sizes are 0 without scales.
    """
    return (x.float() @ decode_weight(weight, scales, block_rows, block_cols).T).to(dtype)


@linear.register_fake
def _(x: Tensor, weight: Tensor, scales: Tensor | None, block_rows: int, block_cols: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


@torch.library.custom_op("dsv4::grouped_linear", mutates_args=())
def grouped_linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, block_rows: int, block_cols: int, groups: int
) -> Tensor:
    """Block-diagonal projection: group g of x [T, groups*I] times rows g*O/groups.. of weight [O, I] -> [T, O]."""
    w = decode_weight(weight, scales, block_rows, block_cols)
    w = w.reshape(groups, -1, w.shape[1])
    grouped = x.float().reshape(x.shape[0], groups, w.shape[2]).transpose(0, 1)
    return torch.bmm(grouped, w.transpose(1, 2)).transpose(0, 1).flatten(1).to(x.dtype)


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, scales: Tensor | None, block_rows: int, block_cols: int, groups: int) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _mixer_logits(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    return normalized(streams.float().flatten(1), None, norm_eps) @ fn.float().T


def _collapsed(pre: Tensor, streams: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * streams.float()).sum(1).to(streams.dtype)


@torch.library.custom_op("dsv4::mhc_mix", mutates_args=())
def mhc_mix(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, hc_eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The mHC mixer and the collapse that uses it (spec 2.1 and 2.2).

    streams [T, n, D]; fn float32 [(2+n)n, nD]; scale [3]; base [(2+n)n]. Returns the collapsed input [T, D] in the
    dtype of the streams, and float32 post [T, n] and comb [T, n, n] (rows: from stream, columns: to stream).
    """
    n = streams.shape[1]
    mix = _mixer_logits(streams, fn, norm_eps)
    base = base.float()
    pre = torch.sigmoid(mix[:, :n] * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = torch.softmax((mix[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(mix.shape[0], n, n), -1) + hc_eps
    comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    return _collapsed(pre, streams), post, comb


@mhc_mix.register_fake
def _(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, hc_eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, n, hidden = streams.shape
    return (
        streams.new_empty((rows, hidden)),
        streams.new_empty((rows, n), dtype=torch.float32),
        streams.new_empty((rows, n, n), dtype=torch.float32),
    )


@torch.library.custom_op("dsv4::mhc_combine", mutates_args=())
def mhc_combine(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'_k = post_k * y + sum_j comb[j, k] * X_j: y [T, D], streams [T, n, D] -> [T, n, D] (spec 2.1)."""
    mixed = torch.bmm(comb.transpose(1, 2), streams.float())
    return (post.unsqueeze(-1) * y.float().unsqueeze(1) + mixed).to(streams.dtype)


@mhc_combine.register_fake
def _(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return streams.new_empty(streams.shape)


@torch.library.custom_op("dsv4::mhc_head", mutates_args=())
def mhc_head(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, hc_eps: float, norm_eps: float) -> Tensor:
    """The final collapse: streams [R, n, D], fn float32 [n, nD], scale [1], base [n] -> [R, D] (spec 2.1)."""
    pre = torch.sigmoid(_mixer_logits(streams, fn, norm_eps) * scale.float() + base.float()) + hc_eps
    return _collapsed(pre, streams)


@mhc_head.register_fake
def _(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, hc_eps: float, norm_eps: float) -> Tensor:
    return streams.new_empty((streams.shape[0], streams.shape[2]))


@torch.library.custom_op("dsv4::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor, limit: float, dtype: torch.dtype) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) in float32, as `dtype`: two [T, I] -> [T, I] (spec 2.11)."""
    return clamped_swiglu(gate.float(), up.float(), limit).to(dtype)


@swiglu.register_fake
def _(gate: Tensor, up: Tensor, limit: float, dtype: torch.dtype) -> Tensor:
    return gate.new_empty(gate.shape, dtype=dtype)


@torch.library.custom_op("dsv4::add", mutates_args=())
def add(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a + b in float32, as `dtype`; equal shapes."""
    return (a.float() + b.float()).to(dtype)


@add.register_fake
def _(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape, dtype=dtype)


@torch.library.custom_op("dsv4::gather_rows", mutates_args=())
def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]: x [T, n, D], rows int32 [R] -> [R, n, D]."""
    return x[rows.long()].clone()


@gather_rows.register_fake
def _(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty((rows.shape[0], *x.shape[1:]))
