"""The emulator: what warps and blocks do together, matrix products, and the faults it must find."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4c.kernels.select.selection import cuda_variant
from tests.kernels.emulation import CUDA, EmulatorError, run_emulated

CASES = Path(__file__).parent / "emulator" / "cases"


def run(
    source: str,
    entry: str,
    *tensors: Tensor,
    block: int,
    grid: int = 1,
    shared_bytes: int = 0,
    backwards: bool = False,
    **constants: int,
) -> None:
    pointers = [*(tensor.data_ptr() for tensor in tensors), 0]
    variant = cuda_variant(source, entry, **{"BLOCK_WARPS": 1, **constants})
    run_emulated(variant, (grid, 1, 1), block, shared_bytes, pointers, backwards, (CASES, CUDA))


@pytest.mark.parametrize("backwards", [False, True])
def test_warp_functions(backwards: bool) -> None:
    x = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    out = torch.full((13, 64), -1, dtype=torch.int32)
    run("warp_functions", "warp_functions", x, out, block=64, backwards=backwards)
    lane = torch.arange(32)
    for warp in (0, 1):
        v, got = x[32 * warp :][:32], out[:, 32 * warp :][:, :32]
        odd = sum(int(bit) << i for i, bit in enumerate(v & 1))
        expected = [
            v[5].expand(32),
            v[lane // 8 * 8 + 3],
            v[lane ^ 3],
            v[torch.where(lane + 4 < 32, lane + 4, lane)],
            v[torch.where(lane % 8 + 3 < 8, lane + 3, lane)],
            v[torch.where(lane >= 4, lane - 4, lane)],
            torch.tensor(odd - (odd >> 31 << 32), dtype=torch.int32).expand(32),
            (v == x[0]).any().expand(32),
            torch.ones(32),
            v.max().expand(32),
            v.sum().expand(32),
            torch.where(lane < 16, v[lane ^ 1], v[lane ^ 2]),
            (x & 1).sum().expand(32),
        ]
        for test, values in enumerate(expected):
            assert torch.equal(got[test], values.to(torch.int32)), test


@pytest.mark.parametrize("warps", [1, 3, 8])
def test_block_reductions(warps: int) -> None:
    x = torch.randn(32 * warps, generator=torch.Generator().manual_seed(2))
    out = torch.empty(2, 32 * warps)
    run("warp_functions", "sums", x, out, block=32 * warps, BLOCK_WARPS=warps)
    assert bool((out[0] == out[0, 0]).all()) and bool((out[1] == x.max()).all())
    torch.testing.assert_close(out[0, 0], x.sum())


def test_shared_memory_is_poisoned_for_every_block() -> None:
    out = torch.zeros(2, 8)
    run("warp_functions", "unwritten", torch.ones(1), out, block=32, grid=2, shared_bytes=16)
    written = torch.zeros(2, 8, dtype=torch.bool)
    written[0, 1] = written[0, 5] = True
    assert torch.equal(out.isnan(), ~written) and bool((out[written] == 1).all())


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("barrier_not_reached_by_all", r"thread 0 waits at __syncthreads in line \d+, thread 40 has returned"),
        ("different_barriers", r"barrier divergence: thread 0 waits at __syncthreads in line \d+, thread 1 at"),
        ("shuffle_of_half_a_warp", r"thread 0 waits for ever in line \d+: __shfl_xor_sync with mask 0xFFFFFFFF"),
        ("different_shuffles", r"lanes of a warp diverge: thread 16 is at __shfl_sync in line \d+"),
        ("null_pointer", r"thread 33: an access to an illegal address"),
        ("misaligned", r"thread 0: an access to a misaligned address"),
        ("past_dynamic_shared", r"byte 32 of dynamic shared memory was written; it has 32"),
    ],
)
def test_faults_are_found(entry: str, message: str) -> None:
    x = torch.arange(64, dtype=torch.int32)
    out = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(EmulatorError, match=message):
        run("warp_functions", entry, x, out, block=64, shared_bytes=32)
    run("warp_functions", "warp_functions", x, torch.zeros(13, 64, dtype=torch.int32), block=64)  # it still works


def test_another_order_shows_a_race() -> None:
    x = torch.arange(64, dtype=torch.int32)
    results = [torch.zeros(64, dtype=torch.int32) for _ in range(2)]
    for backwards, out in enumerate(results):
        run("warp_functions", "race", x, out, block=64, backwards=bool(backwards))
    assert not torch.equal(*results)


def test_number_of_pointers_is_checked() -> None:
    with pytest.raises(EmulatorError, match="the kernel takes 3 pointers, the call has 2"):
        run("warp_functions", "sums", torch.zeros(32), block=32)


def test_product_of_a_warp() -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(shape, generator=generator).bfloat16() for shape in ((16, 16), (16, 8)))
    out = torch.empty(16, 8)
    run("products", "product", a, b, out, block=32)
    torch.testing.assert_close(out, a.float() @ b.float() + 1, rtol=1e-5, atol=1e-5)


def test_copies_arrive_when_waited_for() -> None:
    x = torch.arange(1, 13, dtype=torch.float32)
    out = torch.zeros(2, 12)
    run("products", "copies", x, out, block=32)
    assert torch.equal(out[0, :4], x[:4]) and bool(out[0, 4:].isnan().all())
    assert torch.equal(out[1], torch.cat([x[:8], torch.zeros(4)]))
