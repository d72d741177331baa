"""The emulator's Hopper: barriers that count bytes, blocks that wait for one another, products of warpgroups."""

import pytest
import torch
from torch import Tensor

from tests.kernels.emulation import EmulatorError
from tests.kernels.test_emulator import run

BACKWARDS = pytest.mark.parametrize("backwards", [False, True])
TILE = 32
SHARED_BYTES = 2 * 4 * TILE + 64


def run_barriers(entry: str, *tensors: Tensor, block: int, backwards: bool = False, waits: int = 1) -> None:
    constants = {"TILES": 7, "PRODUCER_WAITS": waits}
    run("barriers", entry, *tensors, block=block, shared_bytes=SHARED_BYTES, backwards=backwards, **constants)


def ring(backwards: bool, waits: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(7 * TILE, generator=torch.Generator().manual_seed(1))
    out = torch.zeros(7 * TILE)
    run_barriers("ring", x, out, block=64, backwards=backwards, waits=waits)
    return 2 * x, out


@BACKWARDS
def test_ring_of_bulk_copies(backwards: bool) -> None:
    expected, out = ring(backwards, waits=1)
    assert torch.equal(out, expected)


@BACKWARDS
def test_ring_whose_producer_does_not_wait(backwards: bool) -> None:
    with pytest.raises(EmulatorError, match=r"one arrival more than|before all threads that wait|nothing can go on"):
        ring(backwards, waits=0)


@BACKWARDS
def test_a_threads_own_copies_arrive(backwards: bool) -> None:
    x, out = torch.randn(TILE, generator=torch.Generator().manual_seed(2)), torch.zeros(2, TILE)
    run_barriers("copies_arrive", x, out, block=32, backwards=backwards)
    assert torch.equal(out[1], x) and bool(out[0].isnan().all())


@BACKWARDS
def test_named_barriers(backwards: bool) -> None:
    out = torch.zeros(2, 128, dtype=torch.int32)
    run_barriers("named", torch.zeros(1), out, block=128, backwards=backwards)
    assert bool((out[0] == 64).all()) and bool((out[1] == 128).all())


FAULTS_OF_BARRIERS = (
    r"nothing can go on: threads 0 to 1 have returned; threads 2 to 63 wait at barrier_wait in line \d+ for phase 0 of "
    r"the barrier at byte 256 of shared memory, which lacks 1 of 3 arrivals and 0 bytes",
    r"thread 1: barrier_arrive in line \d+ is one arrival more than the 1 of phase 0",
    r"threads 0 to 63 wait at barrier_wait in line \d+ .* lacks 0 of 1 arrivals and 64 bytes",
    r"thread 0: bulk_copy in line \d+ was still under way when the block ended",
    r"lacks 1 of 2 arrivals and -128 bytes",
    r"thread 0: barrier_wait in line \d+ of a barrier that was not initialised",
    r"thread 0: barrier_wait in line \d+ of a barrier that was not initialised, or has been overwritten",
    r"thread 1: barrier_arrive in line \d+ of a barrier without a barrier_init_fence by thread 0",
    r"barrier at byte 256 of shared memory ends phase 1 before all threads that wait for phase 0 have run",
    r"thread 0: bulk_copy in line \d+ of 16 bytes, which with both addresses must be multiples of 16",
    r"thread 0: bulk_copy in line \d+ of 20 bytes, which with both addresses must be multiples of 16",
    r"bulk_copy in line \d+ of 128 bytes to byte 256 of shared memory, which has 320",
    r"thread 32 is at named_barrier 1 in line \d+ with 32 threads, thread 0 in line \d+ with 64",
    r"threads 0 to 31 wait at named_barrier 4 in line \d+, where 32 of 64 threads are; threads 32 to 63 have returned",
    r"named_barrier 1 in line \d+: only 16 lanes of warp 0 take part",
    r"named_barrier in line \d+ of id 0 and 32 threads; ids are 1 to 15",
)


@pytest.mark.parametrize("number", range(len(FAULTS_OF_BARRIERS)))
def test_faults_of_barriers_are_found(number: int) -> None:
    with pytest.raises(EmulatorError, match=FAULTS_OF_BARRIERS[number]):
        run_barriers("fault", torch.zeros(64), torch.tensor([number], dtype=torch.int32), block=64)


def run_grid(entry: str, out: Tensor, grid: int, backwards: bool, block: int = 32) -> Tensor:
    x, counters = torch.arange(1, 1 + grid, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    run("grids", entry, x, out, counters, block=block, grid=grid, shared_bytes=128, backwards=backwards, WAYS=3)
    return out


@BACKWARDS
def test_blocks_that_wait_for_one_another(backwards: bool) -> None:
    out = run_grid("chain", torch.zeros(2, dtype=torch.int32), 5, backwards)
    expected = 0
    for block in (*range(4, -1, -1), *range(5), *range(4, -1, -1)):
        expected = expected * 3 + block + 1
    assert out.tolist() == [expected, 0]


@BACKWARDS
def test_the_last_block_adds_up(backwards: bool) -> None:
    out = run_grid("last_adds_up", torch.zeros(9, dtype=torch.int32), 8, backwards, block=704)
    assert out.tolist() == [36, *range(1, 9)]


@BACKWARDS
def test_looks_at_several_places(backwards: bool) -> None:
    assert run_grid("other_looks", torch.zeros(2, dtype=torch.int32), 2, backwards).tolist() == [1, 7]


def test_blocks_that_wait_for_ever() -> None:
    message = (
        r"block \(0, 0, 0\): blocks wait for ever: threads 0 to 2 wait at __syncthreads in line \d+; "
        r"threads 3 to 3 wait at (pause|load_acquire) in line \d+.*; threads 4 to 31 wait at __syncthreads .*"
        r"; block \(2, 0, 0\): threads 0 to 2"
    )
    with pytest.raises(EmulatorError, match=message):
        run_grid("waits_for_ever", torch.zeros(2, dtype=torch.int32), 3, backwards=False)


def test_another_order_of_blocks_shows_a_race() -> None:
    results = [
        run_grid("does_not_wait", torch.zeros(4, dtype=torch.int32), 2, backwards) for backwards in (False, True)
    ]
    assert not torch.equal(*results)


def e4m3(generator: torch.Generator, *sizes: int) -> Tensor:
    return torch.randn(sizes, generator=generator).to(torch.float8_e4m3fn)


def run_products(entry: str, columns: int, k: int, *tensors: Tensor, backwards: bool = False, block: int = 128) -> None:
    shared_bytes, constants = columns * k, {"N": columns, "K": k}
    run("warpgroup_products", entry, *tensors, block=block, shared_bytes=shared_bytes, backwards=backwards, **constants)


@BACKWARDS
@pytest.mark.parametrize("columns", [8, 24, 128])
def test_products_of_warpgroups(columns: int, backwards: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = e4m3(generator, 64, 96), e4m3(generator, columns, 96)
    out, early = torch.zeros(2, 64, columns), torch.zeros(64, columns)
    run_products("products", columns, 96, a, b, out, early, backwards=backwards, block=256)
    expected = a.float() @ b.float().T
    for warpgroup in out:
        torch.testing.assert_close(warpgroup, expected, rtol=1e-5, atol=1e-4)
    assert bool(early.isnan().all())


@BACKWARDS
def test_products_of_f16(backwards: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(rows, 48, generator=generator).half() for rows in (64, 24))
    b[3, 5], b[4] = 2.0**-24, -0.0  # subnormal; zeros
    out = torch.zeros(64, 24)
    run_products("f16_products", 24, 96, a.view(torch.uint8), b.view(torch.uint8), out, backwards=backwards)
    torch.testing.assert_close(out, 1 + a.float() @ b.float().T, rtol=1e-5, atol=1e-5)


@BACKWARDS
def test_products_with_nan_codes_are_nans(backwards: bool) -> None:
    a, b = (torch.ones(rows, 96).to(torch.float8_e4m3fn) for rows in (64, 8))
    b.view(torch.uint8)[3, 5] = 0xFF
    out, early = torch.zeros(64, 8), torch.zeros(64, 8)
    run_products("products", 8, 96, a, b, out, early, backwards=backwards)
    assert bool(out[:, 3].isnan().all()) and bool((out[:, [0, 1, 2, 4, 5, 6, 7]] == 96).all())


def changing_b(backwards: bool, fences: int = 2, waits: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    a, b, out = e4m3(generator, 64, 32), e4m3(generator, 2, 8, 32), torch.zeros(2, 64, 8)
    run_products("b_changes", 8, 32, a, b, out, torch.tensor([fences, waits], dtype=torch.int32), backwards=backwards)
    return out, torch.einsum("mk,bnk->bmn", a.float(), b.float())


@BACKWARDS
def test_b_may_change_after_the_wait(backwards: bool) -> None:
    torch.testing.assert_close(*changing_b(backwards), rtol=1e-5, atol=1e-4)


def test_b_that_changes_before_the_wait_shows() -> None:
    late, _ = changing_b(False, waits=0)
    early, expected = changing_b(True, waits=0)
    torch.testing.assert_close(early, expected, rtol=1e-5, atol=1e-4)
    assert bool((late == 0).all())


@BACKWARDS
@pytest.mark.parametrize("fences", [0, 1])
def test_b_without_a_fence_is_found(fences: int, backwards: bool) -> None:
    with pytest.raises(
        EmulatorError, match=r"reads byte \d+ of shared memory, which was stored without a shared_proxy"
    ):
        changing_b(backwards, fences=fences)


FAULTS_OF_PRODUCTS = (
    r"thread \d+: a product in line \d+ without a product_begin since the last wait",
    r"threads 0 to 95 wait at a product in line \d+, where 96 of 128 threads are; threads 96 to 127 have returned",
    r"threads of a warpgroup diverge: thread 32 is at a product in line \d+, thread 0 at one in line",
    r"a product in line \d+ reads byte 511 of dynamic shared memory, which has 256",
    r"products that no thread waited for at the end of the block",
)


@pytest.mark.parametrize("number", range(len(FAULTS_OF_PRODUCTS)))
def test_faults_of_products_are_found(number: int) -> None:
    a = torch.zeros(64, 32).to(torch.float8_e4m3fn)
    with pytest.raises(EmulatorError, match=FAULTS_OF_PRODUCTS[number]):
        run_products("fault", 8, 32, a, torch.tensor([number], dtype=torch.int32))
