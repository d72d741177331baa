"""What the benchmark of the routed experts measures with, on the CPU: records, reference, lists, manifest."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4c.checkpoint.expert_packing import unpack_fp4, unpack_fp8
from dsv4c.graph.builder import OPERATOR_MODULES
from dsv4c.graph.topology import ExpertShapes, place
from tests.benchmarks.experts.manifest import Call, Manifest, Shape, read_manifest, write_manifest
from tests.benchmarks.experts.planned_calls import SHAPES, Choice, plan
from tests.benchmarks.experts.records import Records, random_records, record_bytes
from tests.benchmarks.experts.reference import expected
from tests.benchmarks.experts.routing import logits_for, make_lists, random_bias, route, uniform_ranks

assert OPERATOR_MODULES  # they register the operators

SHAPE = Shape("tiny", 256, 128, 16, 3, 1.5, 2.0)


def _records(weights: str) -> Records:
    return random_records(SHAPE, weights, -(-record_bytes(SHAPE, weights) // 4096) * 4096, device="cpu")


@pytest.mark.parametrize("weights", ["fp4", "fp8"])
def test_reference_is_that_of_the_operators(weights: str) -> None:
    records = _records(weights)
    size = record_bytes(SHAPE, weights)
    unpack = unpack_fp4 if weights == "fp4" else unpack_fp8
    stored = [unpack(record[:size], SHAPE.hidden, SHAPE.inner) for record in records.data]
    w13, w13_scales, w2, w2_scales = (
        torch.stack([torch.cat(parts) for parts in by_expert])
        for by_expert in (
            [(gate.codes, up.codes) for gate, up, _ in stored],
            [(gate.scales, up.scales) for gate, up, _ in stored],
            [(down.codes,) for *_, down in stored],
            [(down.scales,) for *_, down in stored],
        )
    )
    block = (128, 128)
    if weights == "fp4":
        w13, w2 = w13.view(torch.float4_e2m1fn_x2), w2.view(torch.float4_e2m1fn_x2)
        w13_scales, w2_scales = w13_scales.view(torch.float8_e8m0fnu), w2_scales.view(torch.float8_e8m0fnu)
        block = (1, 32)

    generator = torch.Generator().manual_seed(3)
    x = torch.randn((9, SHAPE.hidden), generator=generator)
    x[3] *= 8  # the clamps are reached
    x = x.bfloat16()
    bias = random_bias(SHAPE.experts, "cpu")
    logits = logits_for(uniform_ranks(len(x), SHAPE.experts, generator), bias)
    routing = route(SHAPE, logits, bias, None)
    ids, pair_weights = torch.ops.dsv4.route_topk(logits, bias, SHAPE.choices, SHAPE.scale)
    assert torch.equal(ids.long(), routing.ids)
    torch.testing.assert_close(pair_weights.double(), routing.weights)

    wanted = torch.ops.dsv4.moe_ffn(
        x, ids, pair_weights, w13, w13_scales, w2, w2_scales, *block, SHAPE.limit, 128
    ).double()
    found = expected(records, x, routing)
    # float32 sums against float64: a rounding to e4m3 between two values may differ once in a while.
    assert (found - wanted).norm() < 1e-3 * wanted.norm()


@pytest.mark.parametrize("kind", ["striped", "pinned"])
def test_lists_follow_the_topology(kind: str) -> None:
    topology = place(ExpertShapes(SHAPE.experts, SHAPE.hidden, SHAPE.inner), 12, kind, 4)
    generator = torch.Generator().manual_seed(5)
    ids = uniform_ranks(20, SHAPE.experts, generator).argsort(1)[:, : SHAPE.choices]
    lists = make_lists(ids, SHAPE.experts, 4, topology.groups, topology.table())
    hit = list(enumerate(torch.bincount(ids.flatten(), minlength=SHAPE.experts).tolist()))
    heads = lists.heads.tolist()
    for group in range(topology.groups):
        experts = [expert for expert, *_ in lists.places[heads[group] : heads[group + 1]].tolist()]
        assert experts == [expert for expert, _ in topology.places(group, hit, 4)]
    assert sorted(lists.list.tolist()) == list(range(ids.numel()))
    for expert, first, count, _ in lists.places.tolist():
        pairs = lists.list[first : first + count].long()
        assert (ids.flatten()[pairs] == expert).all() and pairs.diff().gt(0).all()


def test_manifest_comes_back(tmp_path: Path) -> None:
    choice = Choice(["flash"], ["fp4"], ["striped", "pinned"], [8, 1024], 132, 4, True, True, [("slow", {"SLOTS": 2})])
    variants = []
    for one in plan(choice):
        pairs = zip(one.calls, one.arguments, strict=True)
        calls = tuple(
            Call("x.cubin", call.variant.entry, call.grid, call.block, 0, call.programmatic, arguments, {}, 0, 0)
            for call, arguments in pairs
        )
        variants.append(replace(one.variant, calls=calls))
    manifest = Manifest("0", SHAPES, tuple(variants))
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    placed = next(variant for variant in variants if variant.name == "flash-fp4-pinned-topk-8")
    names = [argument.name for argument in placed.experts_call.arguments]
    assert names[:8] == ["xq", "xs", "pair_weights", "list", "places", "heads", "topology", "experts"]
    assert placed.operand("topology") is not None and placed.groups == 33
    # The lists' kernel writes what the experts' reads.
    assert set(names[:6]) <= {argument.name for argument in placed.calls[0].arguments}


def test_the_other_kernel_beside_the_default() -> None:
    choice = Choice(["flash", "pro"], ["fp4", "fp8"], ["striped"], [128, 256], 132, 4, True, False, [], stream_rows=256)
    found = {one.variant.name: one for one in plan(choice)}
    streamed = {name for name, one in found.items() if one.variant.kind == "stream"}
    # Where a block of FP8 experts of Pro's width has no memory for it, there is none.
    assert streamed == {f"{shape}-striped-topk-256-stream" for shape in ("flash-fp4", "flash-fp8", "pro-fp4")}
    default, other = found["flash-fp4-striped-topk-256"], found["flash-fp4-striped-topk-256-stream"]
    assert (default.variant.kernel, other.variant.kernel) == ("experts_grouped", "experts_stream")
    # The lists are made for places of another size.
    for one, tile in ((default, 32), (other, 16)):
        assert {dict(call.variant.constants)["TILE"] for call in one.calls} == {tile}
    floor = found["flash-fp4-striped-topk-256-stream-floor"].variant
    assert floor.kind == "stream-floor" and not floor.has_results and other.variant.has_results
