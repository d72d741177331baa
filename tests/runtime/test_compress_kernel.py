"""`dsv4::compress`: groups that close within a step, across steps and across blocks, in every storage format."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4c.checkpoint.formats import decode_e8m0, dequantize_fp4
from dsv4c.graph.ops import expand_groups
from dsv4c.graph.state_ops import Rounding, unpack_kv_rows
from tests.runtime.kernel_runner import assert_close, reference, run_kernel, same_bits
from tests.runtime.state_planes import Plane, Positions, block_table, key_plane, kv_plane, poisoned
from tests.runtime.test_kernels import column_slice, normal

SLOTS, BLOCKS, PER_BLOCK = 3, 24, 3
STEPS = ((5, 1, 0), (1, 1, 1), (0, 40, 2), (3, 0, 1), (29, 7, 30), (1, 1, 1), (0, 131, 5))
# Ratio and whether groups overlap: both kinds of the model, and odd ones.
GROUPS = ((4, True), (4, False), (128, False), (3, True), (5, False), (1, False))
# Plane, entry width, rotary channels, rounding, dtype that each step is rounded to.
TARGETS = (
    ("float32", 37, 6, Rounding.NONE, torch.float32),
    ("bfloat16", 37, 6, Rounding.NONE, torch.bfloat16),
    ("bfloat16", 86, 6, Rounding.FP8, torch.bfloat16),
    ("float32", 86, 6, Rounding.FP8, torch.float32),
    ("packed", 86, 6, Rounding.FP8, torch.bfloat16),
    ("packed", 86, 6, Rounding.FP8, torch.float32),
    ("float32", 64, 16, Rounding.HADAMARD_FP4, torch.float32),
    ("bfloat16", 64, 16, Rounding.HADAMARD_FP4, torch.bfloat16),
    ("fp4", 64, 16, Rounding.HADAMARD_FP4, torch.bfloat16),
    ("fp8", 64, 16, Rounding.HADAMARD_FP4, torch.float32),
)


class Compressor:
    def __init__(self, ratio: int, overlap: bool, storage: str, width: int, rotary: int) -> None:
        self.ratio, self.overlap, self.width, self.rotary = ratio, overlap, width, rotary
        self.full = 2 * width if overlap else width
        self.ape = normal(ratio, self.full, seed=21)
        self.norm = 1 + 0.1 * normal(width, seed=22)
        self.inv_freq = 10000.0 ** -(torch.arange(rotary // 2) / (rotary // 2))
        self.table = block_table(SLOTS, BLOCKS if ratio < 128 else 1)
        # Enough rows for an open group (two where groups overlap) and a few to roll back.
        self.open = poisoned(SLOTS, (2 * ratio if overlap else ratio) + 2, 2, self.full, dtype=torch.float32)
        keys = storage in ("fp4", "fp8")
        blocks = self.table.numel()
        self.entries = (
            key_plane(blocks, PER_BLOCK, width, storage)
            if keys
            else kv_plane(blocks, PER_BLOCK, width, rotary, storage)
        )

    def tokens(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Value and gate as columns of one projection."""
        return column_slice(normal(count, 2 * self.full, seed=seed)).chunk(2, -1)  # type: ignore[return-value]

    def run(self, name: str, kv: Tensor, gate: Tensor, slots: Tensor, at: Tensor, *, rounding: int, dtype: torch.dtype,
            threads: int = 2) -> tuple[Tensor, Plane]:  # fmt: skip
        """State after the step, computed by the kernel or by the reference."""
        state, entries = self.open.clone(), self.entries.clone()
        args: list[Any] = [kv, gate, self.ape, self.norm, self.inv_freq, slots, at, self.table, state]
        args += [entries.data, entries.scales, self.ratio, self.overlap, 1e-6, int(rounding), dtype]
        if name == "kernel":
            run_kernel("compress", *args, threads=threads)
        else:
            reference("compress", *args)
        return state, entries

    def decoded(self, plane: Plane) -> Tensor:
        """Float32 rows [N, width]; NaN where nothing was written."""
        data = plane.data.flatten(0, 1)
        if plane.scales is None:
            return data.float()
        scales = plane.scales.flatten(0, 1)
        if data.dtype is torch.uint8:
            return unpack_kv_rows(data, scales, self.width, self.rotary)
        if data.dtype is torch.float8_e4m3fn:
            return data.float() * expand_groups(decode_e8m0(scales), 32, self.width)
        return dequantize_fp4(data.view(torch.uint8), scales)


def assert_entries_close(actual: Tensor, expected: Tensor, rounding: Rounding, dtype: torch.dtype) -> None:
    assert torch.equal(actual.isnan(), expected.isnan())
    actual, expected = actual.nan_to_num(), expected.nan_to_num()
    if rounding is Rounding.NONE:
        assert_close(actual.to(dtype), expected.to(dtype), 2e-5)
        return
    # A value on the border of two codes may take either: one step of e4m3 (2^-3) or e2m1 (1/3 of the largest value of
    # its group), and only few do. In e2m1 a changed input also moves the whole group through the transform.
    step = 2.0**-3 if rounding is Rounding.FP8 else 1 / 3
    size = float(expected.abs().max()) if rounding is Rounding.HADAMARD_FP4 else 1e-2
    torch.testing.assert_close(actual, expected, rtol=step, atol=step * size)
    different = (actual - expected).abs() > 2e-5 * expected.abs().max()
    assert different.float().mean() < (0.01 if dtype is torch.float32 else 0.03)


@pytest.mark.parametrize(("ratio", "overlap"), GROUPS)
@pytest.mark.parametrize(("storage", "width", "rotary", "rounding", "dtype"), TARGETS)
def test_compress(
    ratio: int, overlap: bool, storage: str, width: int, rotary: int, rounding: Rounding, dtype: torch.dtype
) -> None:
    compressor = Compressor(ratio, overlap, storage, width, rotary)
    positions = Positions(SLOTS)
    for number, counts in enumerate(STEPS if ratio > 1 else STEPS[:4]):
        slots, at = positions.step(counts)
        kv, gate = compressor.tokens(len(slots), number)
        state, entries = compressor.run("reference", kv, gate, slots, at, rounding=rounding, dtype=dtype)
        ours, our_entries = compressor.run("kernel", kv, gate, slots, at, rounding=rounding, dtype=dtype)
        assert same_bits(ours, state)
        assert_entries_close(compressor.decoded(our_entries), compressor.decoded(entries), rounding, dtype)
        for threads in (1, 3):
            _, again = compressor.run("kernel", kv, gate, slots, at, rounding=rounding, dtype=dtype, threads=threads)
            assert all(map(same_bits, again.tensors(), our_entries.tensors()))
        compressor.open, compressor.entries = state, entries


@pytest.mark.parametrize(("ratio", "overlap"), GROUPS)
@pytest.mark.parametrize(("storage", "width", "rotary", "rounding", "dtype"), TARGETS)
def test_compress_gives_the_same_bytes_for_exact_inputs(
    ratio: int, overlap: bool, storage: str, width: int, rotary: int, rounding: Rounding, dtype: torch.dtype
) -> None:
    """Small integers, one-hot gates and no rotation: every sum is exact, so the stored bytes must be equal."""
    compressor = Compressor(ratio, overlap, storage, width, rotary)
    compressor.ape.zero_()
    compressor.inv_freq.zero_()
    positions = Positions(SLOTS)
    slots, at = positions.step((131, 7, 9) if ratio > 1 else (9, 7, 5))
    generator = torch.Generator().manual_seed(3)
    kv = torch.randint(-4, 5, (len(slots), compressor.full), generator=generator).float()
    # In every group one or two tokens' gates are far above the others, whose weights are exactly zero.
    gate = torch.full((len(slots), compressor.full), -1000.0)
    group = ratio * (2 if overlap else 1)
    gate += 1000.0 * ((at % group == group - 1) | (at == ratio - 1)).unsqueeze(1)
    state, entries = compressor.run("reference", kv, gate, slots, at, rounding=rounding, dtype=dtype)
    ours, our_entries = compressor.run("kernel", kv, gate, slots, at, rounding=rounding, dtype=dtype)
    assert same_bits(ours, state)
    for a, b in zip(our_entries.tensors(), entries.tensors(), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize(("ratio", "overlap"), GROUPS)
def test_compress_does_not_depend_on_the_chunks(ratio: int, overlap: bool) -> None:
    """One step of three interleaved slots leaves the bits of one step per token."""
    storage, width, rotary, rounding, dtype = TARGETS[4]
    args: dict[str, Any] = {"rounding": rounding, "dtype": dtype}
    whole = Compressor(ratio, overlap, storage, width, rotary)
    slots, at = Positions(SLOTS).step((37, 5, 9))
    kv, gate = whole.tokens(len(slots), 1)
    state, entries = whole.run("kernel", kv, gate, slots, at, **args)
    for row in range(len(slots)):
        one = slice(row, row + 1)
        whole.open, whole.entries = whole.run("kernel", kv[one], gate[one], slots[one], at[one], **args)
    assert same_bits(whole.open, state)
    assert all(map(same_bits, whole.entries.tensors(), entries.tensors()))
