"""What the first call of placed_experts hands over: the router's weights, lists by expert, rounded inputs, zeros."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsv4c.graph.ops import fp8_rounded
from dsv4c.graph.topology import ExpertShapes, Topology, TopologyKind, place
from dsv4c.plan.execution_plan import KernelCall, TensorRef
from tests.kernels.runner import run_first_calls
from tests.kernels.step_memory import view

HIDDEN, INNER, VOCAB = 256, 128, 40


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    """Operands of placed_experts; the experts are never read."""

    x: Tensor
    logits: Tensor
    bias: Tensor | None
    table: Tensor | None
    token_ids: Tensor | None
    topology: Tensor | None
    choices: int
    group_sms: int

    @property
    def arguments(self) -> tuple[object, ...]:
        experts = torch.zeros((self.logits.shape[1], 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
        router = (self.x, self.logits, self.bias, self.table, self.token_ids)
        return *router, experts, self.topology, INNER, self.choices, 1.5, 10.0, self.group_sms

    def routed(self) -> tuple[Tensor, Tensor]:
        if self.bias is not None:
            return torch.ops.dsv4.route_topk(self.logits, self.bias, self.choices, 1.5)
        return torch.ops.dsv4.route_hash(self.logits, self.table, self.token_ids, 1.5)


def case(
    tokens: int,
    experts: int,
    choices: int,
    *,
    hashed: bool = False,
    hidden: int = HIDDEN,
    placed: Topology | None = None,
) -> Case:
    scales = 2.0 ** normal(tokens, hidden, seed=5).round()
    topology = None if placed is None else torch.tensor([placed.table()], dtype=torch.int32)
    table = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(i)) for i in range(VOCAB)])
    return Case(
        x=(normal(tokens, hidden) * scales).bfloat16(),
        logits=normal(tokens, experts, seed=1) * 2,
        bias=None if hashed else normal(experts, seed=2) * 0.1,
        table=table[:, :choices].contiguous() if hashed else None,
        token_ids=torch.arange(tokens, dtype=torch.int32) * 7 % VOCAB if hashed else None,
        topology=topology,
        choices=choices,
        group_sms=0 if placed is None else min(placed.group_sms),
    )


def permuted(columns: int) -> Tensor:
    """The column that each byte of a rounded row holds."""
    byte = torch.arange(columns)
    within = byte % 16
    return byte // 32 * 32 + within // 4 * 8 + within % 4 + byte % 32 // 16 * 4


def unpermuted(row_bytes: Tensor) -> Tensor:
    columns = torch.empty_like(row_bytes)
    columns[:, permuted(row_bytes.shape[1])] = row_bytes
    return columns


def f16_columns(columns: int) -> Tensor:
    """The column that each element of a row in f16 holds."""
    element = torch.arange(columns)
    piece, within = element % 32 // 8, element % 8
    return element // 32 * 32 + within // 2 * 8 + piece * 2 + within % 2


def rounded_rows(xq: Tensor, xs: Tensor) -> Tensor:
    """[T, D] as the experts' kernels take them, in e4m3 with a scale for 128 columns or in f16 with one for a row."""
    if xq.dtype is torch.float16:
        columns = torch.empty_like(xq)
        columns[:, f16_columns(xq.shape[1])] = xq
        return columns.float() / xs.unsqueeze(1)
    codes = unpermuted(xq.view(torch.uint8)).view(torch.float8_e4m3fn)
    return codes.float() * xs.repeat_interleave(128, 1)


def expected_places(
    ids: Tensor, experts: int, tile: int, topology: Topology | None
) -> tuple[list[int], list[tuple[int, int, int, int]], list[int]]:
    """List, places and heads."""
    groups = (
        [list(range(experts))] if topology is None else [list(topology.experts_of(g)) for g in range(topology.groups)]
    )
    pairs, places, heads = [], [], []
    flat = ids.flatten().tolist()
    for group in groups:
        heads.append(len(places))
        for expert in group:
            own = [pair for pair, chosen in enumerate(flat) if chosen == expert]
            for start in range(0, len(own), tile):
                places.append((expert, len(pairs) + start, min(tile, len(own) - start), 0))
            pairs += own
    return pairs, places, [*heads, len(places)]


def check(
    made: Case, capacity: int | None = None, sm_count: int = 8, placed: Topology | None = None, times: int = 1
) -> list[KernelCall]:
    # The last block that is done is that of the last rows, or of the first. Nothing but scratch memory may have changed
    # afterwards, the header's counter neither.
    for backwards in (False, True):
        calls, after = run_first_calls(
            "placed_experts", *made.arguments, capacity=capacity, sm_count=sm_count, backwards=backwards, times=times
        )
        xq, xs, weights, pairs, places, heads = calls[-1].args[:6]
        counters = calls[-1].args[-2]
        tokens, experts = made.logits.shape
        tile = dict(calls[-1].variant.constants)["TILE"]
        assert isinstance(tile, int)

        def found(ref: TensorRef, *sizes: int, after: Tensor = after) -> Tensor:
            return view(after, ref, sizes or ref.sizes)

        ids, expected_weights = made.routed()
        torch.testing.assert_close(found(weights, tokens, made.choices), expected_weights, rtol=2e-6, atol=1e-9)
        expected = expected_places(ids, experts, tile, placed)
        assert found(pairs, ids.numel()).tolist() == expected[0]
        assert [tuple(row) for row in found(places, len(expected[1]), 4).tolist()] == expected[1]
        assert found(heads).tolist() == expected[2]
        hidden = made.x.shape[1]
        kernel = calls[-1].variant.entry
        scales = (tokens,) if kernel == "experts_prefill" else (tokens, hidden // 128)
        rows = rounded_rows(found(xq, tokens, hidden), found(xs, *scales))
        assert torch.equal(rows, fp8_rounded(made.x, 128, hidden))
        zeros, most = found(counters), places.sizes[0]
        # Those of the rows; or of the strips of 256 columns and groups of SMs, and of the places once more.
        strips, groups = -(-hidden // 256), heads.sizes[0] - 1
        more = {"experts_grouped": strips + groups, "experts_prefill": most + strips + 2 * groups}.get(
            kernel, tokens * (hidden // 64)
        )
        assert most + more <= len(zeros)
        assert not zeros[: len(expected[1])].any() and not zeros[most : most + more].any()
    return calls


@pytest.mark.parametrize(
    ("tokens", "experts", "choices"),
    [
        *((tokens, 256, 6) for tokens in (1, 7, 17)),
        *((8, 16, 4), (3, 33, 1), (20, 33, 1), (15, 16, 16), (1, 512, 16), (33, 512, 16)),
    ],
)
def test_lists(tokens: int, experts: int, choices: int) -> None:
    check(case(tokens, experts, choices))


@pytest.mark.parametrize(("tokens", "experts", "choices"), [(1, 256, 6), (9, 16, 4), (20, 33, 1), (15, 16, 16)])
def test_lists_by_token_id(tokens: int, experts: int, choices: int) -> None:
    check(case(tokens, experts, choices, hashed=True))


def test_full_buckets() -> None:
    """Every row of the bucket is of the step."""
    for tokens in (1, 16, 17, 256):
        calls = check(case(tokens, 64, 6), capacity=tokens)
        assert [call.programmatic for call in calls] == [False, True]


def test_the_last_block_has_no_rows() -> None:
    """Blocks of two rows: one with a row that the bucket does not have, and some with none of the step's."""
    for tokens, capacity in ((129, 129), (3, 129), (0, 130)):
        rows, _ = check(case(tokens, 64, 6), capacity)
        assert rows.grid == (65, 1, 1) and dict(rows.variant.constants)["BLOCK_ROWS"] == 2


def test_layers_of_a_step() -> None:
    """The counter of the step's header is as at first for the next launch."""
    for tokens, capacity in ((20, 32), (100, 256), (7, 1024)):
        check(case(tokens, 64, 6), capacity, times=2)


@pytest.mark.parametrize("capacity", [16, 128, 1024])
def test_rows_of_the_same_experts(capacity: int) -> None:
    """An expert with every row: places that are full, and one that is not."""
    made = case(13, 32, 4)
    made.bias = torch.zeros(32)
    made.bias[[3, 8, 9, 31]] = 50.0
    calls = check(made, capacity)
    entry = "experts_stream" if capacity <= 128 else "experts_prefill"
    assert calls[-1].variant.entry == entry and dict(calls[-1].variant.constants)["ROWS"] == capacity


@pytest.mark.parametrize("kind", ["pinned", "traced"])
@pytest.mark.parametrize(
    ("tokens", "experts", "sm_count", "group_sms"), [(3, 16, 8, 2), (20, 12, 11, 3), (20, 64, 6, 1), (3, 5, 132, 4)]
)
def test_topologies(tokens: int, experts: int, sm_count: int, group_sms: int, kind: TopologyKind) -> None:
    counts = [(expert * 37) % 11 for expert in range(experts)] if kind == "traced" else None
    placed = place(ExpertShapes(experts, HIDDEN, INNER), sm_count, kind, group_sms, counts)
    made = case(tokens, experts, 4, placed=placed)
    made.group_sms = group_sms
    check(made, sm_count=sm_count, placed=placed)


def test_the_table_of_the_sm_count() -> None:
    """Of the products of a target, the one in hand; rows are as long as the longest."""
    shapes = ExpertShapes(16, HIDDEN, INNER)
    tables = [place(shapes, sms, "pinned", 40).table() for sms in (132, 114)]
    rows = [[*table, *[0] * (max(map(len, tables)) - len(table))] for table in tables]
    for sms in (132, 114):
        placed = place(shapes, sms, "pinned", 40)
        made = case(5, 16, 4, placed=placed)
        made.topology, made.group_sms = torch.tensor(rows, dtype=torch.int32), 40
        check(made, sm_count=sms, placed=placed)


@pytest.mark.parametrize("columns", [slice(8, 264), slice(3, 259)])
def test_columns_of_wider_tensors(columns: slice) -> None:
    """Rows that can be loaded 16 bytes at a time, and rows that cannot."""
    for tokens in (3, 20):
        made = case(tokens, 16, 4)
        made.x = normal(tokens, 272).bfloat16()[:, columns]
        made.logits = normal(tokens, 40)[:, 5:21]
        check(made)


def test_ties_and_a_bias_of_bfloat16() -> None:
    made = case(6, 40, 3)
    made.logits = torch.zeros(6, 40)
    made.logits[1, 20:] = 1.0
    made.bias = torch.zeros(40).bfloat16()
    check(made)


def test_wide_rows() -> None:
    """More groups than a block has, and rows that are no multiple of its threads."""
    for tokens in (2, 20):
        check(case(tokens, 24, 4, hidden=128 * 19))
