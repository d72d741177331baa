"""The operators without state against formulas written another way, and every operator against its fake."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4c.checkpoint.formats import decode_e8m0, quantize_fp4, quantize_fp8
from dsv4c.graph import expert_ops, fused_ops, ops, sampling, state_ops
from tests.graph.expert_cases import expert_case

dsv4 = torch.ops.dsv4
assert expert_ops  # its import registers operators

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=rng(seed)).to(dtype)


# Scales and rounding


@pytest.mark.parametrize("limit", [ops.FP8_MAX, ops.FP4_MAX])
def test_scale_is_the_smallest_power_of_two_that_fits(limit: float) -> None:
    amax = [limit * 2.0**e for e in range(-20, 20)]
    below, above = (torch.nextafter(torch.tensor(amax), torch.tensor(to)) for to in (0.0, math.inf))
    exact = [2.0**e for e in range(-20, 20)]
    assert ops._power_of_two_scale(torch.tensor(amax), limit).tolist() == exact
    assert ops._power_of_two_scale(below, limit).tolist() == exact
    assert ops._power_of_two_scale(above, limit).tolist() == [2 * scale for scale in exact]


def test_fp8_codes_are_nearest_with_ties_to_even() -> None:
    # 256 makes the scale 1 (amax 256 <= 448); the step of e4m3 is 16 at 128..256, 1 at 8..16, 2^-9 below 2^-6.
    x = torch.tensor([[256.0, 136.0, 152.0, 137.0, 8.5, 9.5, 8.75, 2.0**-10, 3 * 2.0**-10, -136.0, 0.0, 240.0]])
    codes, scale = ops.quantize_fp8_groups(x, x.shape[1])
    assert scale.tolist() == [[1.0]]
    expected = [256.0, 128.0, 160.0, 144.0, 8.0, 10.0, 9.0, 0.0, 2 * 2.0**-9, -128.0, 0.0, 240.0]
    assert codes.float().tolist() == [expected]


def test_e2m1_rounds_every_midpoint_to_the_even_code() -> None:
    for index, (low, high) in enumerate(itertools.pairwise(E2M1)):
        middle = (low + high) / 2
        even = low if index % 2 == 0 else high
        around = torch.tensor([low, middle, high, -middle])
        assert ops.round_e2m1(around).tolist() == [low, even, high, -even]
        nearby = torch.nextafter(torch.tensor([middle, middle]), torch.tensor([0.0, 9.0]))
        assert ops.round_e2m1(nearby).tolist() == [low, high]
    assert torch.signbit(ops.round_e2m1(torch.tensor([-0.1])))


@pytest.mark.parametrize("width", [32, 40, 7])
def test_fp4_groups_are_nearest_values(width: int) -> None:
    x = randn(5, width, seed=width) * 3
    values, scale = ops.quantize_fp4_groups(x, 32)
    for row in range(5):
        for group in range(-(-width // 32)):
            members = x[row, 32 * group : 32 * (group + 1)].double()
            expected = 2.0 ** math.ceil(math.log2(float(members.abs().max()) / 6))
            assert scale[row, group] == expected
            table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64)
            distance = (members[:, None] / expected - table).abs().min(1).values
            found = (members / expected - values[row, 32 * group : 32 * (group + 1)]).abs()
            torch.testing.assert_close(found, distance)


def test_amax_floors_keep_zero_groups_finite() -> None:
    zeros = torch.zeros(1, 40)
    codes, scale = ops.quantize_fp8_groups(zeros, 32)
    # 1e-4 / 448 lies between 2^-23 and 2^-22.
    assert codes.float().abs().max() == 0 and scale.tolist() == [[2.0**-22] * 2]
    tiny = torch.full((1, 32), 1e-6)
    assert ops.quantize_fp8_groups(tiny, 32)[1].tolist() == [[2.0**-22]]
    values, scale = ops.quantize_fp4_groups(zeros, 32)
    assert values.abs().max() == 0 and scale.tolist() == [[2.0**-126] * 2]


@pytest.mark.parametrize("width", [64, 100, 32])
def test_rounding_is_idempotent_and_leaves_the_rest(width: int) -> None:
    x = randn(3, width, dtype=torch.bfloat16)
    rounded = dsv4.fp8_round(x, 64, width - 16)
    assert torch.equal(rounded[:, width - 16 :], x[:, width - 16 :])
    assert not torch.equal(rounded, x)
    assert torch.equal(dsv4.fp8_round(rounded, 64, width - 16), rounded)
    # An e4m3 value has 3 mantissa bits: half a step is 1/16 of it.
    torch.testing.assert_close(rounded.float(), x.float(), rtol=1 / 16, atol=1e-4)
    four = dsv4.fp4_round(x, 32)
    assert torch.equal(dsv4.fp4_round(four, 32), four) and not torch.equal(four, x)


# Transforms


@pytest.mark.parametrize("width", [1, 2, 16, 128])
def test_hadamard_is_the_explicit_matrix(width: int) -> None:
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)])
    x = randn(2, 3, width)
    torch.testing.assert_close(ops.hadamard_transformed(x), x @ matrix / math.sqrt(width))
    torch.testing.assert_close(ops.hadamard_transformed(ops.hadamard_transformed(x)), x)


@pytest.mark.parametrize("shape", [(7, 24), (7, 3, 24), (7, 8)])
def test_rope_is_a_complex_product(shape: tuple[int, ...]) -> None:
    x = randn(*shape)
    positions = torch.tensor([0, 1, 2, 5, 100, 1000, 4095], dtype=torch.int32)
    inv_freq = torch.tensor([1.0, 0.1, 0.01, 0.003])
    angle = (positions.double()[:, None] * inv_freq.double()).view(7, *[1] * (len(shape) - 2), 4)
    tail = torch.view_as_complex(x[..., -8:].double().unflatten(-1, (4, 2)).contiguous())
    turned = torch.view_as_real(tail * torch.polar(torch.ones_like(angle), angle)).flatten(-2).float()
    found = dsv4.rope(x, positions, inv_freq, False)
    # float32 angles: 4095 * 1 rad carries an error of about 2e-4 rad.
    torch.testing.assert_close(found[..., -8:], turned, rtol=0, atol=1e-3)
    assert torch.equal(found[..., :-8], x[..., :-8])
    torch.testing.assert_close(dsv4.rope(found, positions, inv_freq, True), x)


def test_rms_norm_and_swiglu() -> None:
    x, weight = randn(4, 40, dtype=torch.bfloat16), randn(40, seed=1)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    assert torch.equal(dsv4.rms_norm(x, weight, 1e-3), expected.float().bfloat16())
    gate = torch.tensor([[-9.0, -1.0, 0.5, 3.0, 9.0]])
    up = torch.tensor([[-9.0, 9.0, -0.5, 1.0, 2.0]])
    bounded = [
        g / (1 + math.exp(-g)) * u
        for g, u in zip([-9.0, -1.0, 0.5, 2.0, 2.0], [-2.0, 2.0, -0.5, 1.0, 2.0], strict=True)
    ]
    torch.testing.assert_close(dsv4.swiglu(gate, up, 2.0, torch.float32), torch.tensor([bounded]))


def mixer_by_hand(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One row in float64, with loops over the streams."""
    n = streams.shape[0]
    flat = streams.flatten().double()
    normed = flat / torch.sqrt((flat * flat).mean() + 1e-6)
    logits = [float(row @ normed) for row in fn.double()]
    sigmoid = [1 / (1 + math.exp(-(logits[i] * float(scale[i // n]) + float(base[i])))) for i in range(2 * n)]
    comb = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        row = [math.exp(logits[(2 + i) * n + j] * float(scale[2]) + float(base[(2 + i) * n + j])) for j in range(n)]
        comb[i] = torch.tensor([value / sum(row) + eps for value in row])
    for iteration in range(iterations):
        if iteration:
            comb = torch.stack([row / (row.sum() + eps) for row in comb])
        comb = torch.stack([column / (column.sum() + eps) for column in comb.T]).T
    pre = [value + eps for value in sigmoid[:n]]
    collapsed = sum(pre[i] * streams[i].double() for i in range(n))
    assert isinstance(collapsed, Tensor)
    return collapsed, torch.tensor([2 * value for value in sigmoid[n:]]), comb


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("iterations", [1, 5])
def test_mhc_mix_and_combine(n: int, iterations: int) -> None:
    streams, y = randn(3, n, 10), randn(3, 10, seed=9)
    fn, base = randn((2 + n) * n, n * 10, seed=1) / 4, randn((2 + n) * n, seed=2)
    scale = torch.tensor([0.7, -0.4, 1.3])
    collapsed, post, comb = dsv4.mhc_mix(streams, fn, scale, base, iterations, 1e-3, 1e-6)
    out = dsv4.mhc_combine(y, streams, post, comb)
    for row in range(3):
        expected = mixer_by_hand(streams[row], fn, scale, base, iterations, 1e-3)
        for found, wanted in zip((collapsed, post, comb), expected, strict=True):
            torch.testing.assert_close(found[row], wanted.float(), rtol=1e-5, atol=1e-5)
        for k in range(n):
            wanted = post[row, k] * y[row] + sum(comb[row, j, k] * streams[row, j] for j in range(n))
            torch.testing.assert_close(out[row, k], wanted)


def test_mhc_head_is_one_gated_sum() -> None:
    streams, fn, base = randn(2, 3, 10), randn(3, 30, seed=1) / 4, randn(3, seed=2)
    found = dsv4.mhc_head(streams, fn, torch.tensor([-0.6]), base, 1e-3, 1e-6)
    for row in range(2):
        flat = streams[row].flatten()
        gate = torch.sigmoid(fn @ (flat / (flat.pow(2).mean() + 1e-6).sqrt()) * -0.6 + base) + 1e-3
        torch.testing.assert_close(found[row], gate @ streams[row])


# Projections, router, experts


def stored_forms(rows: int, columns: int, seed: int) -> dict[str, tuple[Tensor, Tensor | None, int, int, Tensor]]:
    """name -> (weight, scales, block rows, block columns, float32 values)."""
    values = randn(rows, columns, seed=seed)
    codes8, scales8 = quantize_fp8(values, (16, 24))
    grid = decode_e8m0(scales8).repeat_interleave(16, 0)[:rows].repeat_interleave(24, 1)[:, :columns]
    codes4, scales4 = quantize_fp4(values)
    low, high = (torch.tensor([*E2M1, *(-v for v in E2M1)])[code.long()] for code in (codes4 & 15, codes4 >> 4))
    values4 = torch.stack((low, high), -1).flatten(1) * decode_e8m0(scales4).repeat_interleave(32, 1)
    e8m0 = torch.float8_e8m0fnu
    return {
        "f32": (values, None, 0, 0, values),
        "bf16": (values.bfloat16(), None, 0, 0, values.bfloat16().float()),
        "fp8": (codes8, scales8.view(e8m0), 16, 24, codes8.float() * grid),
        "fp8 float scales": (codes8, decode_e8m0(scales8), 16, 24, codes8.float() * grid),
        "fp4": (codes4.view(torch.float4_e2m1fn_x2), scales4.view(e8m0), 1, 32, values4),
    }


@pytest.mark.parametrize("form", stored_forms(1, 32, 0))
def test_linear_decodes_every_stored_form(form: str) -> None:
    # 37 rows and 64 columns end inside a block of 16 by 24.
    weight, scales, block_rows, block_cols, values = stored_forms(37, 64, 3)[form]
    x = randn(5, 64)
    found = dsv4.linear(x, weight, scales, block_rows, block_cols, torch.float32)
    torch.testing.assert_close(found, (x.double() @ values.double().T).float(), rtol=1e-5, atol=1e-5)
    rounded = dsv4.linear(x.bfloat16(), weight, scales, block_rows, block_cols, torch.bfloat16)
    assert torch.equal(rounded, (x.bfloat16().float() @ values.T).bfloat16())
    x = randn(5, 192)
    weight, scales, block_rows, block_cols, values = stored_forms(12, 64, 3)[form]
    found = dsv4.grouped_linear(x, weight, scales, block_rows, block_cols, 3)
    wanted = [x[:, 64 * g : 64 * (g + 1)] @ values[4 * g : 4 * (g + 1)].T for g in range(3)]
    torch.testing.assert_close(found, torch.cat(wanted, 1))


def test_route_topk_breaks_ties_low_and_ignores_bias_in_weights() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    bias = torch.tensor([5.0, 0.0, 0.0, 0.0, 0.0])
    ids, weights = dsv4.route_topk(logits, bias, 3, 2.5)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    scores = [math.sqrt(math.log1p(math.exp(value))) for value in (1.0, 2.0, 2.0)]
    torch.testing.assert_close(weights[0], torch.tensor([2.5 * s / sum(scores) for s in scores]))
    torch.testing.assert_close(weights.sum(1), torch.tensor([2.5, 2.5]))


def test_count_routing_adds_every_choice() -> None:
    counts = torch.tensor([[5, 0, 1, 0]])
    dsv4.count_routing(ints(0, 2, 2, 2).view(2, 2), counts)
    assert counts.tolist() == [[6, 0, 4, 0]]
    dsv4.count_routing(torch.empty(0, 2, dtype=INT32), counts)
    assert counts.tolist() == [[6, 0, 4, 0]]


def test_route_hash_takes_the_row_of_the_token() -> None:
    table = torch.tensor([[0, 1], [2, 0], [1, 2]])
    logits = randn(2, 3)
    ids, weights = dsv4.route_hash(logits, table, torch.tensor([2, 1], dtype=torch.int32), 1.5)
    assert ids.tolist() == [[1, 2], [2, 0]]
    scores = torch.log1p(logits.exp()).sqrt()
    chosen = torch.stack([scores[0, [1, 2]], scores[1, [2, 0]]])
    torch.testing.assert_close(weights, 1.5 * chosen / chosen.sum(1, keepdim=True))


@pytest.mark.parametrize("form", ["f32", "fp8", "fp4"])
def test_moe_ffn_is_the_sum_over_chosen_experts(form: str) -> None:
    tokens, hidden, inner, limit = 6, 64, 32, 0.5
    up = [stored_forms(2 * inner, hidden, seed) for seed in range(4)]
    down = [stored_forms(hidden, inner, 10 + seed) for seed in range(4)]

    def stack(parts: list[dict[str, Any]], at: int) -> Any:
        return None if parts[0][form][at] is None else torch.stack([p[form][at].view(torch.uint8) for p in parts])

    def typed(parts: list[dict[str, Any]], at: int) -> Any:
        stacked = stack(parts, at)
        return None if stacked is None else stacked.view(parts[0][form][at].dtype)

    x = randn(tokens, hidden)
    # Expert 1 has no token, expert 3 one.
    ids = torch.tensor([[0, 2], [2, 0], [0, 2], [2, 3], [0, 2], [2, 0]], dtype=torch.int32)
    weights = torch.rand(tokens, 2, generator=rng(4))
    blocks = up[0][form][2:4]
    found = dsv4.moe_ffn(x, ids, weights, typed(up, 0), typed(up, 1), typed(down, 0), typed(down, 1), *blocks, limit, 0)
    for token in range(tokens):
        wanted = torch.zeros(hidden, dtype=torch.float64)
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            gate, rest = (up[expert][form][4].double() @ x[token].double()).split(inner)
            gate, rest = gate.clamp(max=limit), rest.clamp(-limit, limit)
            wanted += down[expert][form][4].double() @ (gate / (1 + (-gate).exp()) * rest) * weight
        torch.testing.assert_close(found[token], wanted.float(), rtol=1e-4, atol=1e-4)


# Sampling


def test_philox_known_answer() -> None:
    # "Random123" known-answer file, philox4x32 10 rounds, zero counter and key.
    assert sampling.philox(0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert sampling.uniform(0, 0) == 0x6627E8 / 2**24
    words = {sampling.philox(seed, counter) for seed in (0, 1, 1 << 32, -1) for counter in (0, 1, 1 << 32)}
    assert len(words) == 12  # both halves of key and counter take part


def sample(logits: Tensor, *, positions: list[int] | None = None, mask: Tensor | None = None, **settings: Any) -> Any:
    count = logits.shape[0]
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0} | settings
    dtypes = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "seed": torch.int64}
    columns = [torch.full((count,), defaults[key], dtype=dtype) for key, dtype in dtypes.items()]
    at = torch.tensor(positions or list(range(count)), dtype=torch.int32)
    return dsv4.sample(logits, torch.arange(count, dtype=torch.int32), at, *columns, mask).tolist()


def bit_mask(ids: list[int], vocab_size: int, rows: int = 1) -> Tensor:
    words = [sum(1 << (i % 32) for i in ids if i // 32 == word) for word in range(-(-vocab_size // 32))]
    signed = [word - (1 << 32) if word >> 31 else word for word in words]
    return torch.tensor([signed] * rows, dtype=torch.int32)


def test_greedy_takes_the_lowest_of_equals_and_obeys_the_mask() -> None:
    logits = torch.zeros(1, 70)
    logits[0, [5, 40, 63]] = 2.0
    assert sample(logits, temperature=0.0) == [5]
    assert sample(logits, temperature=0.0, mask=bit_mask([31, 63, 69], 70)) == [63]
    assert sample(logits, temperature=0.0, mask=bit_mask([31, 69], 70)) == [31]
    assert sample(logits, temperature=0.0, mask=bit_mask([], 70)) == [-1]
    assert sample(logits, temperature=1.0, mask=bit_mask([], 70)) == [-1]


def test_draws_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.1, 0.4])
    rows = 4000
    drawn = sample(probabilities.log().repeat(rows, 1), positions=list(range(rows)), seed=3)
    counts = torch.bincount(torch.tensor(drawn), minlength=3) / rows
    # Five standard deviations of a share of 0.5 among 4000.
    torch.testing.assert_close(counts, probabilities, rtol=0, atol=0.04)
    cold = sample(probabilities.log().repeat(rows, 1), positions=list(range(rows)), temperature=0.5)
    squares = probabilities.square() / probabilities.square().sum()
    torch.testing.assert_close(torch.bincount(torch.tensor(cold), minlength=3) / rows, squares, rtol=0, atol=0.04)


def test_top_k_and_top_p_keep_prefixes() -> None:
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log().repeat(500, 1)
    assert set(sample(logits)) == {0, 1, 2, 3}
    assert set(sample(logits, top_k=1)) == {1}
    assert set(sample(logits, top_k=2)) == {1, 2}
    assert set(sample(logits, top_k=9)) == {0, 1, 2, 3}
    assert set(sample(logits, top_p=0.39)) == {1}
    assert set(sample(logits, top_p=0.41)) == {1, 2}
    assert set(sample(logits, top_p=0.69)) == {1, 2}
    assert set(sample(logits, top_p=0.0)) == {1}
    # Top-p is a share of what top-k kept: 4/7 of {1, 2} is token 1 alone.
    assert set(sample(logits, top_k=2, top_p=0.5)) == {1}
    # Equal logits are ordered by id.
    assert set(sample(torch.zeros(500, 4), top_k=2)) == {0, 1}
    assert set(sample(logits, mask=bit_mask([0, 3], 4, 500), top_k=1)) == {3}


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = randn(3, 50)
    alone = [sample(logits[i : i + 1], positions=[10 + i], seed=7)[0] for i in range(3)]
    assert sample(logits, positions=[10, 11, 12], seed=7) == alone
    flat = torch.zeros(20, 50)
    assert sample(flat, seed=1) != sample(flat, seed=2)


# Every operator against its schema and fake

F32, BF16, INT32 = torch.float32, torch.bfloat16, torch.int32
FREQS = torch.tensor([1.0, 0.1])


def ints(*values: int, dtype: torch.dtype = INT32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def fp8_weight(*shape: int) -> Tensor:
    return randn(*shape).to(torch.float8_e4m3fn)


def exponents(*shape: int) -> Tensor:
    return torch.full(shape, 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def kv_planes() -> tuple[Tensor, Tensor]:
    """Packed ring of two slots of 6 rows: head size 40, 4 rotary channels."""
    row, scales = state_ops.packed_row_bytes(40, 4), state_ops.packed_scale_bytes(40, 4)
    return torch.zeros(2, 6, row, dtype=torch.uint8), torch.full((2, 6, scales), 127, dtype=torch.uint8)


def state_cases() -> dict[str, Callable[[], tuple[Any, ...]]]:
    slots, positions, table = ints(1, 0, 1), ints(4, 0, 5), ints(0, 1, 2, 3).view(2, 2)
    pooling = (randn(3, 16), randn(3, 16), randn(3, 16), randn(8), FREQS, slots, positions, table)
    ring, ring_scales = kv_planes()
    keys = torch.zeros(4, 5, 8, dtype=torch.uint8)
    return {
        "compress": lambda: (*pooling, randn(2, 9, 2, 16), randn(4, 5, 8), None, 3, True, 1e-6, 0, F32),
        "select_entries": lambda: (
            *(randn(3, 2, 16), randn(3, 2), keys.view(torch.float4_e2m1fn_x2), torch.full((4, 5, 1), 127).byte()),
            *(slots, ints(9, 0, 10), table, 3, 2, 0.5),
        ),
        "attention": lambda: (
            *(randn(3, 2, 40, dtype=BF16), randn(3, 40, dtype=BF16), ring, ring_scales, None, None, None),
            *(randn(2), slots, positions, table, 5, 1, 4, 0.2),
        ),
        "attention_unrotated": lambda: (
            *(randn(3, 2, 40, dtype=BF16), randn(3, 40, dtype=BF16), ring, ring_scales, None, None, None),
            *(randn(2), slots, positions, table, 5, 1, 4, 0.2, FREQS),
        ),
        "count_routing": lambda: (ints(0, 2, 2, 3).view(2, 2), torch.zeros(1, 4, dtype=torch.int64)),
        "commit_ring": lambda: (randn(3, 40, dtype=BF16), ring.clone(), ring_scales.clone(), slots, positions, 4),
    }


CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "embedding": lambda: (ints(3, 0, 3), randn(5, 7, dtype=BF16), F32),
    "rms_norm": lambda: (randn(1, 3, 5, dtype=BF16), None, 1e-6),
    "fp8_round": lambda: (randn(3, 37, dtype=BF16), 16, 35),
    "fp4_round": lambda: (randn(3, 2, 37), 32),
    "hadamard": lambda: (randn(3, 2, 16, dtype=BF16),),
    "rope": lambda: (randn(3, 2, 9, dtype=BF16), ints(0, 5, 2), FREQS, True),
    "row_chain": lambda: (
        *(randn(3, 2, 16, dtype=BF16), randn(16), ints(0, 5, 2), FREQS),
        *(True, 1e-6, False, True, int(fused_ops.RowRounding.FP4), 8, 0),
    ),
    "linear": lambda: (randn(3, 37), fp8_weight(19, 37), exponents(2, 3), 16, 16, BF16),
    "grouped_linear": lambda: (randn(3, 10, dtype=BF16), randn(6, 5), None, 0, 0, 2),
    "mhc_mix": lambda: (randn(1, 3, 7, dtype=BF16), randn(15, 21), randn(3), randn(15), 3, 1e-6, 1e-6),
    "mhc_mix_norm": lambda: (
        *(randn(1, 3, 7, dtype=BF16), randn(15, 21), randn(3), randn(15), randn(7)),
        *(3, 1e-6, 1e-6, 1e-6),
    ),
    "mhc_combine": lambda: (randn(3, 7), randn(3, 2, 7), randn(3, 2), randn(3, 2, 2)),
    "mhc_head": lambda: (randn(3, 2, 7, dtype=BF16), randn(2, 14), randn(1), randn(2), 1e-6, 1e-6),
    "route_topk": lambda: (randn(3, 5), randn(5), 3, 1.5),
    "route_hash": lambda: (randn(3, 5), ints(0, 1, 2, 3, dtype=torch.int64).view(2, 2), ints(1, 0, 1), 1.5),
    "moe_ffn": lambda: (
        *(randn(3, 7, dtype=BF16), ints(0, 2, 2, 0, 0, 2).view(3, 2), randn(3, 2), randn(3, 6, 7), None),
        *(randn(3, 7, 3), None, 0, 0, 1.0, 128),
    ),
    "placed_experts": lambda: (
        *(randn(3, 128, dtype=BF16), randn(3, 2), None, ints(1, 0, 1).long().view(3, 1), ints(2, 0, 1)),
        *(expert_case(2, 128, 128).packed, ints(0, 0).view(2, 1), 128, 1, 1.5, 10.0, 4),
    ),
    "swiglu": lambda: (randn(3, 10)[:, :5], randn(3, 10)[:, 5:], 1.0, BF16),
    "add": lambda: (randn(3, 5, dtype=BF16), randn(3, 5), BF16),
    "gather_rows": lambda: (randn(3, 2, 5), ints(2, 0)),
    "sample": lambda: (
        *(randn(2, 33), ints(0, 2), ints(4, 5, 6), torch.ones(2), ints(0, 3), torch.ones(2)),
        *(ints(1, 2, dtype=torch.int64), None),
    ),
} | state_cases()


def test_every_operator_has_a_case() -> None:
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("dsv4::")}
    assert registered == {f"dsv4::{name}" for name in CASES}


def content(value: Any) -> Any:
    return value.contiguous().view(torch.uint8).clone() if isinstance(value, Tensor) else value


def tensors(value: Any) -> list[Tensor]:
    return [] if value is None else [value] if isinstance(value, Tensor) else list(value)


@pytest.mark.parametrize("name", CASES)
def test_schema_and_fake(name: str) -> None:
    """As torch.library.opcheck, which knows no eight- and four-bit floats."""
    op, args = getattr(dsv4, name).default, CASES[name]()
    before = [content(arg) for arg in args]
    results = tensors(op(*args))
    storages = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
    assert not any(result.untyped_storage().data_ptr() in storages for result in results)
    for arg, old, declared in zip(args, before, op._schema.arguments, strict=True):
        changes = declared.alias_info is not None and declared.alias_info.is_write
        if isinstance(arg, Tensor):
            assert torch.equal(content(arg), old) != changes, declared.name
    with FakeTensorMode() as mode:
        fakes = tensors(op(*(mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args)))
    described = [[(t.dtype, tuple(t.shape), t.stride()) for t in group] for group in (results, fakes)]
    assert described[0] == described[1]


SMALL_FLOATS = ("linear", "placed_experts", "select_entries")


@pytest.mark.parametrize("name", [name for name in CASES if name not in SMALL_FLOATS])
def test_opcheck(name: str) -> None:
    found = torch.library.opcheck(
        getattr(dsv4, name).default, CASES[name](), test_utils=("test_schema", "test_faketensor")
    )
    assert set(found.values()) == {"SUCCESS"}
