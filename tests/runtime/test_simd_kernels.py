"""The inner loops of every instruction set that this processor has, on every weight format, against the references.

Formats are compared on random codes rather than on quantised weights: that reaches subnormals, the largest codes and
both zeros, which a quantiser rarely writes.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dsv4c.graph.ops import decode_weight, expand_groups
from tests.runtime.kernel_runner import check_kernel, reference, run_kernel, simd_variants, use_simd

FORMATS = ("f32", "bf16", "f16", "fp8", "fp8-32x64", "fp4", "int8-32", "int8-128", "int4-32", "int4-64", "int4-128")
# Widths: one chunk of the loops, less than one, a few and a part of one, more than a tile of decoded weights.
WIDTHS = (32, 6, 230, 1090)
# Rows of x: each way of blocking them (1 to 4 directly, tiles, more than a tile's tokens) and the rests.
TOKENS = (1, 2, 3, 4, 5, 67)


@pytest.fixture(params=simd_variants())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    use_simd(request.param)
    yield request.param
    use_simd(None)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator(sum(shape)), dtype=torch.uint8)


def exponents(*shape: int) -> Tensor:
    """Powers of two around one, with a few of the smallest."""
    codes = torch.randint(119, 131, shape, generator=generator(1), dtype=torch.uint8)
    codes[torch.rand(shape, generator=generator(2)) < 0.05] = 0
    return codes.view(torch.float8_e8m0fnu)


def half_scales(*shape: int) -> Tensor:
    """Float16 scales, with subnormals and a zero."""
    scales = torch.rand(shape, generator=generator(3)) * 0.1
    scales[torch.rand(shape, generator=generator(4)) < 0.1] = 3e-6
    scales.view(-1)[0] = 0
    return scales.half()


def random_weight(outputs: int, inputs: int, storage: str) -> tuple[Tensor, Tensor | None, int, int]:
    """Weight, scales, block rows and columns."""
    kind, _, blocks = storage.partition("-")
    if kind in ("f32", "bf16", "f16"):
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[kind]
        weight = torch.randn(outputs, inputs, generator=generator(5))
        weight[:, ::7] *= 1e-5  # subnormal as float16
        return weight.to(dtype), None, 0, 0
    if kind == "fp8":
        rows, columns = (int(n) for n in (blocks or "128x128").split("x"))
        codes = random_bytes(outputs, inputs)
        codes[(codes & 0x7F) == 0x7F] = 0x80  # no NaN
        return codes.view(torch.float8_e4m3fn), exponents(-(-outputs // rows), -(-inputs // columns)), rows, columns
    if kind == "fp4":
        return (
            random_bytes(outputs, inputs // 2).view(torch.float4_e2m1fn_x2),
            exponents(outputs, -(-inputs // 32)),
            0,
            0,
        )
    group = int(blocks)
    scales = half_scales(outputs, -(-inputs // group))
    if kind == "int8":
        return random_bytes(outputs, inputs).view(torch.int8), scales, 1, group
    return random_bytes(outputs, inputs // 2), scales, 1, group


def decoded(weight: Tensor, scales: Tensor | None, block_rows: int, block_cols: int) -> Tensor:
    """`decode_weight`, which wants whole groups, for integer codes [..., O, I] whose last group may be partial."""
    if scales is None or scales.dtype != torch.float16:
        matrices = zip(weight, [None] * len(weight) if scales is None else scales, strict=True)
        if weight.dim() == 2:
            return decode_weight(weight, scales, block_rows, block_cols)
        return torch.stack([decode_weight(codes, factors, block_rows, block_cols) for codes, factors in matrices])
    codes = weight
    if weight.dtype == torch.uint8:
        codes = torch.stack((weight & 15, weight >> 4), -1).flatten(-2).to(torch.int8)
        codes = codes - 16 * (codes > 7)
    return codes.float() * expand_groups(scales.float(), block_cols, codes.shape[-1])


@pytest.mark.parametrize("storage", FORMATS)
def test_linear(variant: str, storage: str) -> None:
    for inputs in WIDTHS:
        weight = random_weight(21, inputs, storage)
        for tokens in TOKENS:
            x = torch.randn(tokens, inputs, generator=generator(tokens))
            expected = reference("linear", x, decoded(*weight), None, 0, 0, torch.float32)
            check_kernel("linear", x, *weight, torch.float32, rows=(0,), expected=expected)


@pytest.mark.parametrize("storage", FORMATS)
def test_decoding_is_exact(variant: str, storage: str) -> None:
    """Rows of the unit matrix select the decoded weights: the products have one term, so nothing is rounded."""
    weight = random_weight(13, 262, storage)
    unit = torch.eye(262)
    expected = decoded(*weight).T
    (ours,) = run_kernel("linear", unit, *weight, torch.float32)
    assert torch.equal(ours, expected)
    for column in range(0, 262, 29):
        (row,) = run_kernel("linear", unit[column : column + 1], *weight, torch.float32)
        assert torch.equal(row[0], expected[column])


def test_e4m3_with_the_largest_scales(variant: str) -> None:
    codes, _, rows, columns = random_weight(128, 160, "fp8")
    codes.view(torch.uint8)[:] &= 0x8F  # at most 2^-6 * 15/8
    scales = torch.tensor([[254, 0]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    for tokens in (1, 7):
        check_kernel("linear", torch.eye(160)[:tokens], codes, scales, rows, columns, torch.float32, rows=(0,))


@pytest.mark.parametrize("storage", FORMATS)
def test_grouped_linear(variant: str, storage: str) -> None:
    weight = random_weight(3 * 22, 96, storage)
    for tokens in (1, 4, 33):
        x = torch.randn(tokens, 3 * 96, generator=generator(tokens))
        expected = reference("grouped_linear", x, decoded(*weight), None, 0, 0, 3)
        check_kernel("grouped_linear", x, *weight, 3, rows=(0,), expected=expected)


@pytest.mark.parametrize("storage", FORMATS)
def test_moe_ffn(variant: str, storage: str) -> None:
    experts, inner, hidden = 3, 70, 160
    parts13 = [random_weight(2 * inner, hidden, storage) for _ in range(experts)]
    parts2 = [random_weight(hidden, inner, storage) for _ in range(experts)]

    def stack(parts: list[tuple[Tensor, Tensor | None, int, int]]) -> tuple[Tensor, Tensor | None]:
        weight = torch.stack([part[0].view(torch.uint8) for part in parts]).view(parts[0][0].dtype)
        if parts[0][1] is None:
            return weight, None
        scales = torch.stack([part[1].view(torch.uint8) for part in parts if part[1] is not None])
        return weight, scales.view(parts[0][1].dtype)

    weights = (*stack(parts13), *stack(parts2), *parts2[0][2:])
    plain = (decoded(*weights[:2], *weights[4:]), None, decoded(*weights[2:]), None, 0, 0)
    for tokens in (1, 3, 40):
        x = torch.randn(tokens, hidden, generator=generator(tokens)) * 0.1
        ids = torch.randint(0, experts, (tokens, 2), generator=generator(tokens), dtype=torch.int32)
        factors = torch.rand(tokens, 2, generator=generator(6))
        expected = reference("moe_ffn", x, ids, factors, *plain, 10.0, 0)
        check_kernel("moe_ffn", x, ids, factors, *weights, 10.0, 0, rows=(0, 1, 2), tolerance=2e-5, expected=expected)


def test_swiglu_over_the_range_of_exp(variant: str) -> None:
    gate = torch.linspace(-120, 120, 4096).view(4, 1024)
    check_kernel("swiglu", gate, torch.ones_like(gate), 1000.0, torch.float32, rows=(0, 1), tolerance=1e-6)


def test_unknown_variant_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no variant"):
        use_simd("abacus")
