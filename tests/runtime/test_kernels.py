"""Every CPU kernel without state against its reference body, over shapes that fit no tile."""

from itertools import product

import pytest
import torch
from torch import Tensor

from dsv4c.checkpoint.formats import quantize_fp4, quantize_fp8
from dsv4c.graph.ops import clamped_swiglu, decode_weight, fp8_rounded
from tests.runtime.kernel_runner import check_kernel, reference, run_kernel, same_bits

TOKENS = (1, 2, 7, 33)
FLOATS = (torch.float32, torch.bfloat16)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def column_slice(x: Tensor, before: int = 3, after: int = 5) -> Tensor:
    """`x` as columns of a wider tensor whose other columns are NaN."""
    wide = torch.full((*x.shape[:-1], before + x.shape[-1] + after), float("nan"), dtype=x.dtype)
    wide[..., before : before + x.shape[-1]] = x
    return wide[..., before : before + x.shape[-1]]


def stored(weight: Tensor, storage: str) -> tuple[Tensor, Tensor | None, int, int]:
    """A float32 matrix [O, I] or stack [E, O, I] as weight, scales, block rows and columns."""
    if storage in ("f32", "bf16", "f16"):
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[storage]
        return weight.to(dtype), None, 0, 0
    rows, columns = (0, 0) if storage == "fp4" else tuple(int(n) for n in storage.split("-")[1].split("x"))
    stack = weight if weight.dim() == 3 else weight.unsqueeze(0)
    parts = [quantize_fp4(matrix) if storage == "fp4" else quantize_fp8(matrix, (rows, columns)) for matrix in stack]
    codes = torch.stack([codes.view(torch.uint8) for codes, _ in parts])
    codes = codes.view(torch.float4_e2m1fn_x2 if storage == "fp4" else torch.float8_e4m3fn)
    scales = torch.stack([scales for _, scales in parts]).view(torch.float8_e8m0fnu)
    if storage.endswith("-f32"):
        # Released scales are powers of two; float32 ones need not be.
        scales = scales.float() * 0.7
    return (codes, scales, rows, columns) if weight.dim() == 3 else (codes[0], scales[0], rows, columns)


STORAGES = ("f32", "bf16", "f16", "fp8-128x128", "fp8-32x16", "fp8-48x48-f32", "fp4")


@pytest.mark.parametrize("table_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_embedding(table_dtype: torch.dtype, dtype: torch.dtype) -> None:
    table = normal(50, 37, dtype=table_dtype)
    for tokens in TOKENS:
        ids = torch.randint(0, 50, (tokens,), generator=generator(tokens), dtype=torch.int32)
        check_kernel("embedding", ids, table, dtype, exact=True, rows=(0,))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", (1, 8, 37, 200))
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    for tokens in TOKENS:
        x = normal(tokens, width, dtype=dtype)
        check_kernel("rms_norm", x, normal(width, seed=1), 1e-6, rows=(0,))
        check_kernel("rms_norm", column_slice(x), normal(width, dtype=torch.bfloat16, seed=1), 1e-6, rows=(0,))
        check_kernel("rms_norm", column_slice(normal(tokens, 3, width, dtype=dtype)), None, 1e-6, rows=(0,))
    check_kernel("rms_norm", torch.zeros(2, width, dtype=dtype), None, 1e-6)


# Values that quantisation treats specially: zeros of both signs, ties, tiny and huge groups, and a maximum whose
# quotient by the limit is a power of two.
def rounding_rows(width: int, dtype: torch.dtype) -> Tensor:
    rows = normal(9, width, dtype=torch.float32)
    rows[1] = 0
    rows[2] = -0.0
    rows[3] *= 1e-20
    rows[4] *= 1e30
    rows[5] = torch.arange(width) % 29 * 0.25 - 3
    rows[6] = 448.0 * 2.0 ** -(torch.arange(width) % 19)
    rows[7] = 6.0 * 2.0 ** (torch.arange(width) % 3)
    rows[8] = torch.arange(width) * 1.0625 - 11
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("width", "group", "rounded"), ((192, 64, 128), (200, 128, 200), (37, 64, 37), (100, 32, 90)))
def test_fp8_round(dtype: torch.dtype, width: int, group: int, rounded: int) -> None:
    x = rounding_rows(width, dtype)
    check_kernel("fp8_round", x, group, rounded, exact=True, rows=(0,))
    check_kernel("fp8_round", column_slice(x).view(3, 3, -1), group, rounded, exact=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("width", "group"), ((128, 32), (100, 32), (7, 8)))
def test_fp4_round(dtype: torch.dtype, width: int, group: int) -> None:
    x = rounding_rows(width, dtype)
    check_kernel("fp4_round", x, group, exact=True, rows=(0,))
    check_kernel("fp4_round", column_slice(x).view(3, 3, -1), group, exact=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", (1, 2, 64, 128))
def test_hadamard(dtype: torch.dtype, width: int) -> None:
    # The butterflies are the same sums in the same order, so the bits are equal.
    check_kernel("hadamard", column_slice(normal(33, 5, width, dtype=dtype)), exact=True, rows=(0,))


def test_hadamard_refuses_other_widths() -> None:
    with pytest.raises(RuntimeError, match="power of two"):
        run_kernel("hadamard", normal(2, 12))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("inverse", (False, True))
def test_rope(dtype: torch.dtype, inverse: bool) -> None:
    inv_freq = 10000.0 ** -(torch.arange(6) / 6)
    for tokens in TOKENS:
        positions = torch.randint(0, 100_000, (tokens,), generator=generator(tokens), dtype=torch.int32)
        check_kernel("rope", normal(tokens, 21, dtype=dtype), positions, inv_freq, inverse, rows=(0, 1))
        heads = column_slice(normal(tokens, 3, 12, dtype=dtype))
        check_kernel("rope", heads, positions, inv_freq, inverse, rows=(0, 1))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_linear(storage: str, dtype: torch.dtype) -> None:
    for outputs, inputs in ((1, 32), (67, 96), (130, 224)):
        weight = stored(normal(outputs, inputs, seed=1), storage)
        for tokens in TOKENS:
            x = normal(tokens, inputs, dtype=dtype)
            for result in FLOATS:
                check_kernel("linear", x, *weight, result, rows=(0,))
        check_kernel("linear", column_slice(x), *weight, dtype, rows=(0,))
        # More rows than one tile of tokens.
        check_kernel("linear", normal(150, inputs, dtype=dtype), *weight, dtype, rows=(0,))


@pytest.mark.parametrize("inputs", (1, 7, 33, 45))
@pytest.mark.parametrize("storage", ("f32", "bf16", "fp8-16x16"))
def test_linear_of_odd_width(inputs: int, storage: str) -> None:
    weight = stored(normal(5, inputs, seed=1), storage)
    check_kernel("linear", normal(3, inputs), *weight, torch.float32, rows=(0,))


def test_linear_takes_rows_of_a_merged_weight() -> None:
    merged = normal(40, 50, seed=1)
    check_kernel("linear", normal(3, 33), merged[8:21, 4:37], None, 0, 0, torch.float32, rows=(0,))


def test_linear_refuses_sizes_that_do_not_fit() -> None:
    with pytest.raises(RuntimeError, match="sizes"):
        run_kernel("linear", normal(2, 12), normal(3, 13), None, 0, 0, torch.float32)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_grouped_linear(storage: str, dtype: torch.dtype) -> None:
    weight = stored(normal(3 * 22, 96, seed=1), storage)
    for tokens in TOKENS:
        x = normal(tokens, 3 * 96, dtype=dtype)
        check_kernel("grouped_linear", x, *weight, 3, rows=(0,))
    check_kernel("grouped_linear", column_slice(x), *weight, 3, rows=(0,))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("streams", (1, 2, 4, 5))
def test_mhc_mix_and_head(dtype: torch.dtype, streams: int) -> None:
    hidden, outputs = 44, (2 + streams) * streams
    fn = normal(outputs, streams * hidden, seed=1) * 0.1
    scale, base = normal(3, seed=2), normal(outputs, seed=3)
    for tokens in TOKENS:
        x = normal(tokens, streams, hidden, dtype=dtype)
        broadcast = normal(tokens, hidden, dtype=dtype).unsqueeze(1).expand(-1, streams, -1)
        for value in (x, broadcast, column_slice(x)):
            # Twenty normalisations of sums in another order.
            check_kernel("mhc_mix", value, fn, scale, base, 20, 1e-6, 1e-6, rows=(0,), tolerance=2e-5)
            head = (fn[:streams], scale[:1], base[:streams])
            check_kernel("mhc_head", value, *head, 1e-6, 1e-6, rows=(0,), tolerance=2e-5)
    check_kernel("mhc_mix", normal(140, streams, hidden, dtype=dtype), fn, scale, base, 1, 1e-6, 1e-6, rows=(0,))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("y_dtype", FLOATS)
def test_mhc_combine(dtype: torch.dtype, y_dtype: torch.dtype) -> None:
    for streams in (1, 3, 4):
        for tokens in TOKENS:
            y = normal(tokens, 37, dtype=y_dtype)
            post, comb = normal(tokens, streams, seed=1), normal(tokens, streams, streams, seed=2)
            x = normal(tokens, streams, 37, dtype=dtype, seed=3)
            check_kernel("mhc_combine", y, x, post, comb, rows=(0, 1, 2, 3))
            broadcast = x[:, :1].expand(-1, streams, -1)
            check_kernel("mhc_combine", column_slice(y), broadcast, post, comb, rows=(0, 1, 2, 3))


@pytest.mark.parametrize(("experts", "k"), ((4, 1), (16, 4), (37, 6), (5, 5)))
def test_route_topk(experts: int, k: int) -> None:
    bias = normal(experts, seed=1) * 0.1
    for tokens in TOKENS:
        logits = normal(tokens, experts, seed=tokens) * 4
        check_kernel("route_topk", logits, bias, k, 1.5, rows=(0,))
        check_kernel("route_topk", column_slice(logits), bias, k, 2.5, rows=(0,))


def test_route_topk_breaks_ties_to_the_lower_expert() -> None:
    logits = torch.tensor([[1.0] * 9, [0, 2, 2, 0, 2, 2, 0, 2, 2], [-200.0] * 9, [30.0, 25, 30, 25, 30, 25, 1, 1, 1]])
    ids, weights = check_kernel("route_topk", logits, torch.zeros(9), 4, 1.5, rows=(0,))
    assert ids.tolist() == [[0, 1, 2, 3], [1, 2, 4, 5], [0, 1, 2, 3], [0, 2, 4, 1]]
    assert weights[2].tolist() == [0.0] * 4


def test_route_hash() -> None:
    table = torch.randint(0, 11, (50, 3), generator=generator(), dtype=torch.int64)
    table[7] = 4  # a repeated expert
    for tokens in TOKENS:
        ids = torch.randint(0, 50, (tokens,), generator=generator(tokens), dtype=torch.int32)
        ids[0] = 7
        check_kernel("route_hash", normal(tokens, 11, seed=tokens) * 4, table, ids, 1.5, rows=(0, 2))


@pytest.mark.parametrize(("experts", "k"), ((4, 1), (37, 6), (1, 1)))
def test_count_routing(experts: int, k: int) -> None:
    counts = torch.arange(experts).unsqueeze(0) << 33  # more than 32 bits hold
    expected = counts.clone()
    for tokens in TOKENS:
        ids = torch.randint(0, experts, (tokens, k), generator=generator(tokens), dtype=torch.int32)
        run_kernel("count_routing", ids, counts)
        reference("count_routing", ids, expected)
        assert same_bits(counts, expected)


@pytest.mark.parametrize("wrong", [-1, 5, 2**31 - 1])
def test_count_routing_refuses_what_is_no_expert(wrong: int) -> None:
    counts = torch.zeros(1, 5, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="count_routing is given a choice that is no expert"):
        run_kernel("count_routing", torch.tensor([[wrong]], dtype=torch.int32), counts)
    assert not counts.any()


def expert_ids(tokens: int, k: int, experts: int, crowd: str) -> Tensor:
    """Choices where an expert gets no token, one token, or every token."""
    ids = torch.randint(0, experts - 1, (tokens, k), generator=generator(tokens), dtype=torch.int32)
    if crowd == "all":
        ids[:] = 2
    elif crowd == "one":
        ids[:] = 1
        ids[-1, -1] = experts - 1
    return ids


def rows_on_a_rounding_border(x: Tensor, ids: Tensor, factors: Tensor, w13: Tensor, limit: float, group: int) -> Tensor:
    """The rows of `moe_ffn` whose products another order of the sums may round to other e4m3 numbers: bool [T].

    w13 float32 [E, 2I, D]. Each gate and up is a sum of D products, off by up to two roundings of the sum of their
    magnitudes; silu and the products that follow are off by up to four of their own.
    """
    matrices = w13.double()[ids.long()]
    rounded = fp8_rounded(x, group, x.shape[1]).to(x.dtype).double()
    gate, up = torch.einsum("td,tkod->tko", rounded, matrices).chunk(2, -1)
    error = torch.einsum("td,tkod->tko", rounded.abs(), matrices.abs()) * 2.0**-23
    gate_error, up_error = error.chunk(2, -1)
    found = []
    for a, b, c in product((-1, 1), repeat=3):
        h = clamped_swiglu(gate + a * gate_error, up + b * up_error, limit) * (1 + c * 2.0**-22)
        h = (h * factors.unsqueeze(-1)).float().to(x.dtype)
        found.append(fp8_rounded(h, group, h.shape[-1]))
    return torch.stack([(h != found[0]).flatten(1).any(1) for h in found]).any(0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("group", (0, 128, 24))
def test_moe_ffn(dtype: torch.dtype, storage: str, group: int) -> None:
    experts, inner, hidden, k = 5, 96, 160, 3
    w13 = stored(normal(experts, 2 * inner, hidden, seed=1), storage)
    w2 = stored(normal(experts, hidden, inner, seed=2), storage)
    weights = (*w13[:2], *w2)
    codes13, scales13, *block = w13
    decoded13 = torch.stack(
        [decode_weight(codes13[e], None if scales13 is None else scales13[e], *block) for e in range(experts)]
    )
    for tokens in TOKENS:
        x = normal(tokens, hidden, dtype=dtype)
        for crowd in ("some", "one", "all"):
            ids = expert_ids(tokens, k, experts, crowd)
            factors = torch.rand(tokens, k, generator=generator(3))
            # A product on a rounding border may flip, and one of them moves a sum by this much; a step of e4m3 is
            # sixteen of bfloat16.
            tolerance = 5e-3 if group else 1e-5 if dtype is torch.float32 else 2e-3
            args = (x, ids, factors, *weights, 1.0, group)
            (actual,) = check_kernel("moe_ffn", *args, rows=(0, 1, 2), tolerance=tolerance)
            if group:
                (expected,) = reference("moe_ffn", *args)
                off = (actual - expected).abs().amax(1) > 1e-5 * expected.abs().max()
                on_border = rows_on_a_rounding_border(x, ids, factors, decoded13, 1.0, group)
                assert not (off & ~on_border).any(), f"rows {(off & ~on_border).nonzero().flatten().tolist()} are off"
                assert on_border.sum() <= 1 + tokens // 4


def test_moe_ffn_with_one_blob_per_expert() -> None:
    """Experts as contiguous blobs: each stack strides over the whole of one; odd sizes, more rows than a tile."""
    experts, inner, hidden, tokens = 4, 7, 33, 300
    blobs = torch.full((experts, 2 * inner * hidden + 11 + hidden * inner), float("nan"))
    w13, w2 = normal(experts, 2 * inner, hidden, seed=1), normal(experts, hidden, inner, seed=2)
    blobs[:, : 2 * inner * hidden] = w13.flatten(1)
    blobs[:, 2 * inner * hidden + 11 :] = w2.flatten(1)
    stride = blobs.stride(0)
    strided13 = blobs.as_strided(w13.shape, (stride, hidden, 1))
    strided2 = blobs.as_strided(w2.shape, (stride, inner, 1), 2 * inner * hidden + 11)
    x, ids = normal(tokens, hidden), expert_ids(tokens, 2, experts, "some")
    factors = torch.rand(tokens, 2, generator=generator(3))
    args = (strided13, None, strided2, None, 0, 0, 10.0, 0)
    (ours,) = check_kernel("moe_ffn", column_slice(x), ids, factors, *args, rows=(0, 1, 2))
    assert same_bits(ours, run_kernel("moe_ffn", x, ids, factors, w13, None, w2, None, 0, 0, 10.0, 0)[0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("result", FLOATS)
def test_swiglu(dtype: torch.dtype, result: torch.dtype) -> None:
    for inner in (1, 37, 64):
        for tokens in TOKENS:
            merged = normal(tokens, 2 * inner, dtype=dtype) * 8
            check_kernel("swiglu", *merged.chunk(2, -1), 5.0, result, rows=(0, 1))
            check_kernel("swiglu", *column_slice(merged).chunk(2, -1), 5.0, result, rows=(0, 1))


@pytest.mark.parametrize("a", FLOATS)
@pytest.mark.parametrize("b", FLOATS)
@pytest.mark.parametrize("result", FLOATS)
def test_add(a: torch.dtype, b: torch.dtype, result: torch.dtype) -> None:
    for tokens in TOKENS:
        x, y = normal(tokens, 37, dtype=a), normal(tokens, 37, dtype=b, seed=1)
        check_kernel("add", column_slice(x), y, result, exact=True, rows=(0, 1))
        check_kernel("add", x, column_slice(y), result, exact=True, rows=(0, 1))


@pytest.mark.parametrize("dtype", FLOATS)
def test_gather_rows(dtype: torch.dtype) -> None:
    x = normal(9, 3, 37, dtype=dtype)
    rows = torch.tensor([8, 0, 3, 3], dtype=torch.int32)
    broadcast = x[:, :1].expand(-1, 3, -1)
    for value in (x, broadcast, column_slice(x)):
        check_kernel("gather_rows", value, rows, exact=True, rows=(1,))
    assert run_kernel("gather_rows", x, rows[:0])[0].shape == (0, 3, 37)


def test_unknown_kernel_and_dtype_are_errors() -> None:
    with pytest.raises(RuntimeError, match="does not take int64"):
        run_kernel("rms_norm", torch.zeros(2, 4, dtype=torch.int64), None, 1e-6)
    assert reference("add", normal(1, 2), normal(1, 2), torch.float32)[0].shape == (1, 2)
