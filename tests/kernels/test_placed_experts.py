"""placed_experts, all its calls, against the reference body: formats, routings, buckets, topologies.

Results are compared relative to the largest: float32 sums in another order, and a product at a border of e4m3 may fall
to its other side, which changes one input of the second projection by up to 1/16.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4c.graph.topology import ExpertShapes, TopologyKind, place
from dsv4c.kernels.registry import SELECTORS
from dsv4c.kernels.select.placed_experts import select_placed_experts
from dsv4c.kernels.select.selection import Selection
from dsv4c.plan.execution_plan import KernelCall, Launch
from tests.graph.expert_cases import expert_case
from tests.kernels.comparison import assert_close
from tests.kernels.runner import Runner, run_operator

HIDDEN, INNER = 256, 128
VOCAB = 50
ROUNDED_CODE = 2e-2
LIMIT = 10.0
# The emulator runs so many blocks, the device its own number.
EMULATED_SMS, DEVICE_SMS = 4, 132


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@functools.cache
def packed(count: int, hidden: int, inner: int, storage: str) -> Tensor:
    return expert_case(count, hidden, inner, fp8=storage == "fp8").packed


def sms(runner: Runner) -> int:
    return EMULATED_SMS if runner == "emulator" else DEVICE_SMS


def arguments(
    tokens: int,
    *,
    count: int = 16,
    choices: int = 4,
    storage: str = "fp4",
    hidden: int = HIDDEN,
    inner: int = INNER,
    routing: str = "score",
    topology: Tensor | None = None,
    group_sms: int = 0,
) -> tuple[object, ...]:
    x = normal(tokens, hidden, seed=tokens).bfloat16()
    logits = normal(tokens, count, seed=3) * 2
    router: tuple[Tensor | None, Tensor | None, Tensor | None]
    if routing == "hash":
        orders = [torch.randperm(count, generator=torch.Generator().manual_seed(row)) for row in range(VOCAB)]
        table = torch.stack([order[:choices] for order in orders])
        router = None, table, torch.arange(tokens, dtype=torch.int32) * 7 % VOCAB
    else:
        bias = normal(count, seed=4) * 0.1
        if routing == "same":  # all rows to the same experts
            bias[-choices:] = 100.0
        router = bias, None, None
    experts = packed(count, hidden, inner, storage)
    return x, logits, *router, experts, topology, inner, choices, 1.5, LIMIT, group_sms


def check(runner: Runner, args: tuple[object, ...], capacity: int | None = None) -> None:
    (actual,) = run_operator("placed_experts", *args, on=runner, capacity=capacity, sm_count=sms(runner))
    assert_close(actual, torch.ops.dsv4.placed_experts(*args), ROUNDED_CODE)


@pytest.mark.parametrize(
    ("tokens", "capacity", "storage"),
    [
        *((tokens, capacity, "fp4") for tokens, capacity in ((1, 1), (2, 4), (8, 8), (17, 64), (40, 128))),
        *((tokens, capacity, "fp8") for tokens, capacity in ((1, 1), (7, 8), (9, 16))),
    ],
)
def test_steps(runner: Runner, tokens: int, capacity: int, storage: str) -> None:
    check(runner, arguments(tokens, storage=storage), capacity)


@pytest.mark.parametrize(
    ("tokens", "capacity", "routing", "storage"),
    [
        (1, 1, "hash", "fp4"),
        (40, 64, "hash", "fp4"),
        (9, 512, "score", "fp8"),
        (9, 512, "hash", "fp8"),
        (70, 1024, "score", "fp4"),
        *((tokens, capacity, "same", "fp8") for tokens, capacity in ((13, 16), (9, 512))),
        *((tokens, capacity, "same", "fp4") for tokens, capacity in ((8, 8), (40, 64), (40, 128), (70, 1024))),
    ],
)
def test_routings(runner: Runner, tokens: int, capacity: int, routing: str, storage: str) -> None:
    """With `same` an expert has every row and most have none."""
    check(runner, arguments(tokens, routing=routing, storage=storage), capacity)


@pytest.mark.parametrize(
    ("count", "choices", "tokens", "capacity"),
    [
        *((256, 6, *step) for step in ((3, 4), (20, 512))),
        (256, 1, 20, 64),
        *((5, 5, *step) for step in ((3, 4), (20, 128))),
    ],
)
def test_choices(runner: Runner, count: int, choices: int, tokens: int, capacity: int) -> None:
    check(runner, arguments(tokens, count=count, choices=choices, hidden=128), capacity)


@pytest.mark.parametrize(
    ("hidden", "inner", "capacity", "storage"),
    [
        *((hidden, 128, 8, "fp4") for hidden in (384, 512)),
        (128, 640, 8, "fp8"),
        *((1152, 384, capacity, "fp4") for capacity in (8, 512)),
        *((384, 640, capacity, "fp8") for capacity in (128, 512)),
    ],
)
def test_widths(runner: Runner, hidden: int, inner: int, capacity: int, storage: str) -> None:
    """Panels and columns that are no multiple of what a block takes at a time."""
    check(runner, arguments(6, count=6, choices=2, hidden=hidden, inner=inner, storage=storage), capacity)


@pytest.mark.parametrize("kind", ["pinned", "traced"])
@pytest.mark.parametrize(("tokens", "capacity", "group_sms"), [(3, 4, 1), (20, 64, 3), (20, 512, 2)])
def test_topologies(runner: Runner, tokens: int, capacity: int, group_sms: int, kind: TopologyKind) -> None:
    shapes = ExpertShapes(16, HIDDEN, INNER)
    counts = [expert * 37 % 11 for expert in range(16)] if kind == "traced" else None
    table = torch.tensor([place(shapes, sms(runner), kind, group_sms, counts).table()], dtype=torch.int32)
    for routing in ("score", "same"):  # `same`: groups without a place
        check(runner, arguments(tokens, routing=routing, topology=table, group_sms=group_sms), capacity)


def test_spaced_records_and_wider_rows(runner: Runner) -> None:
    """Experts with other bytes between them, and x that is part of a wider tensor."""
    x, *router, experts, topology, inner, choices, scale, limit, group_sms = arguments(5)
    assert isinstance(experts, Tensor) and isinstance(x, Tensor)
    records = experts.view(torch.uint8)
    spaced = torch.zeros((len(records), records.shape[1] + 4096), dtype=torch.uint8)
    spaced[:, : records.shape[1]] = records
    wide = torch.zeros((5, HIDDEN + 40), dtype=torch.bfloat16)
    wide[:, 24 : 24 + HIDDEN] = x
    part = spaced.view(experts.dtype)[:, : records.shape[1]]
    for capacity in (8, 512):
        args = (wide[:, 24 : 24 + HIDDEN], *router, part, topology, inner, choices, scale, limit, group_sms)
        check(runner, args, capacity)


@pytest.fixture
def places_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of up to 256 rows stream the weights."""

    def select(launch: Launch, selection: Selection) -> list[KernelCall]:
        calls = select_placed_experts(launch, selection, stream_rows=256)
        last = calls[-1].variant
        assert (last.entry, dict(last.constants)["TILE"]) == ("experts_stream", 16)
        return calls

    monkeypatch.setitem(SELECTORS["sm_90a"], "placed_experts", select)


def chosen(ids: list[list[int]], routing: str, **shapes: Any) -> tuple[object, ...]:
    """The arguments of a step whose rows choose these experts, two each of 34."""
    args = list(arguments(len(ids), count=34, choices=2, routing=routing, **shapes))
    if routing == "hash":
        args[3], args[4] = torch.tensor(ids), torch.arange(len(ids), dtype=torch.int32)
    else:
        logits = normal(len(ids), 34, seed=5) * 0.2
        args[1] = logits.scatter_add(1, torch.tensor(ids), torch.full((len(ids), 2), 6.0))
    return tuple(args)


def rows_of(counts: list[int]) -> list[list[int]]:
    """Choices of which each expert has as many; no row has one twice."""
    pairs = [expert for expert, count in enumerate(counts) for _ in range(count)]
    half = len(pairs) // 2
    assert len(pairs) == 2 * half and max(counts) <= half
    return [list(row) for row in zip(pairs[:half], pairs[half:], strict=True)]


@pytest.mark.parametrize(("routing", "storage"), [("score", "fp4"), ("hash", "fp8")])
def test_places_of_16_pairs(runner: Runner, routing: str, storage: str, places_of_16: None) -> None:
    check(runner, chosen(rows_of([1, 8, 9, 0, 15, 16, 17]), routing, storage=storage), capacity=136)


@pytest.mark.parametrize(
    ("hidden", "inner", "storage"), [(384, 640, "fp8"), (1152, 128, "fp4"), (128, 384, "fp4"), (512, 640, "fp8")]
)
def test_widths_with_places_of_16_pairs(
    runner: Runner, hidden: int, inner: int, storage: str, places_of_16: None
) -> None:
    """One expert has every row, in two places; tiles do not fill the warpgroups or the ring."""
    ids = [[3, 4 + row % 3] for row in range(18)]
    check(runner, chosen(ids, "score", hidden=hidden, inner=inner, storage=storage), capacity=129)


@pytest.mark.parametrize("kind", ["pinned", "traced"])
def test_topologies_with_places_of_16_pairs(runner: Runner, kind: TopologyKind, places_of_16: None) -> None:
    shapes = ExpertShapes(34, HIDDEN, INNER)
    counts = [expert * 37 % 11 for expert in range(34)] if kind == "traced" else None
    table = torch.tensor([place(shapes, sms(runner), kind, 2, counts).table()], dtype=torch.int32)
    check(runner, arguments(30, count=34, choices=2, topology=table, group_sms=2), capacity=136)


@pytest.mark.gpu
@pytest.mark.sm90a
@pytest.mark.parametrize("storage", ["fp4", "fp8"])
@pytest.mark.parametrize(("tokens", "capacity"), [(130, 192), (192, 192)])
def test_flash_experts_with_places_of_16_pairs(
    on_device: Runner, tokens: int, capacity: int, storage: str, places_of_16: None
) -> None:
    args = arguments(tokens, count=48, choices=2, hidden=4096, inner=2048, storage=storage)
    check(on_device, args, capacity)


@pytest.mark.gpu
@pytest.mark.sm90a
@pytest.mark.parametrize("storage", ["fp4", "fp8"])
@pytest.mark.parametrize(
    ("tokens", "capacity"),
    [(1, 1), (2, 2), (7, 8), (16, 16), (40, 64), (128, 128), (256, 256), (300, 1024), (1100, 4096)],
)
def test_flash_experts(on_device: Runner, tokens: int, capacity: int, storage: str) -> None:
    """V4-Flash's sizes but for the number of experts, which decides the time of the reference."""
    args = arguments(tokens, count=24, choices=6, hidden=4096, inner=2048, storage=storage)
    check(on_device, args, capacity)


@pytest.mark.gpu
@pytest.mark.sm90a
@pytest.mark.parametrize("kind", ["pinned", "traced"])
@pytest.mark.parametrize(("tokens", "capacity"), [(3, 4), (100, 256), (300, 1024)])
def test_flash_topologies(on_device: Runner, tokens: int, capacity: int, kind: TopologyKind) -> None:
    shapes = ExpertShapes(24, 4096, 2048)
    counts = [expert * 37 % 11 for expert in range(24)] if kind == "traced" else None
    table = torch.tensor([place(shapes, DEVICE_SMS, kind, 8, counts).table()], dtype=torch.int32)
    args = arguments(tokens, count=24, choices=6, hidden=4096, inner=2048, topology=table, group_sms=8)
    check(on_device, args, capacity)
