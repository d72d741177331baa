"""Packed experts in the plan: where they lie, what their bytes are, and that the plan computes what the graph does."""

from functools import cache
from typing import Any

import pytest
import torch

from dsv4c.checkpoint.checkpoint import Checkpoint
from dsv4c.checkpoint.expert_packing import StoredMatrix, record_bytes, unpack_fp4, unpack_fp8
from dsv4c.checkpoint.formats import Encoding, decode_e8m0
from dsv4c.compiler import weight_blocks
from dsv4c.errors import CheckpointError
from dsv4c.graph.annotations import Constant
from dsv4c.graph.topology import ExpertShapes, place
from dsv4c.passes.pass_manager import run_passes
from dsv4c.passes.pipeline import build_pipeline
from dsv4c.plan.execution_plan import ExecutionPlan, TensorRef
from dsv4c.plan.lowering import lower_graph
from dsv4c.plan.reference_run import ReferenceRun
from dsv4c.plan.weight_layout import EXPERT_ALIGNMENT
from dsv4c.recipe import ExpertsRecipe, WeightsRecipe
from dsv4c.step_abi import DType, Space
from dsv4c.weight_report import ErrorMeter, weight_totals
from tests.fixtures import Quantization
from tests.graph.small_models import (
    DECODE_BUCKETS,
    MIXED_BUCKETS,
    ROLLBACK_ROWS,
    SCHEDULE,
    checkpoint,
    context,
    graph,
    step_rows,
)

LAYERS, EXPERTS, HIDDEN, INNER = 2, 5, 256, 128
# How the checkpoint stores them, and what the recipe makes of them.
FORMS: list[tuple[Quantization, str]] = [("fp8_fp4", "stored"), ("fp8", "stored"), ("bf16", "fp4"), ("bf16", "fp8")]


@cache
def plan(stored: Quantization = "fp8_fp4", kept: Any = "stored", **experts: Any) -> ExecutionPlan:
    ctx = context("reference", target="h100", experts=ExpertsRecipe(**experts), weights=WeightsRecipe(experts=kept))
    gm = run_passes(graph("two_even", "reference", stored), build_pipeline(), ctx)
    return lower_graph(gm, DECODE_BUCKETS, MIXED_BUCKETS, ROLLBACK_ROWS)


def section(opened: Checkpoint, made: ExecutionPlan) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(weight_blocks(opened, made))), dtype=torch.uint8)


def stack(made: ExecutionPlan, layer: int) -> TensorRef:
    launch = next(each for each in made.buckets[0].launches if each.name == f"l{layer}_placed_experts")
    ref = launch.args[5]
    assert isinstance(ref, TensorRef)
    return ref


@pytest.mark.parametrize(("stored", "kept"), FORMS)
def test_the_section_holds_the_experts_of_the_checkpoint(stored: Quantization, kept: str) -> None:
    opened, made = checkpoint("two_even", stored), plan(stored, kept)
    fp8 = "fp8" in (stored, kept)
    written = section(opened, made)
    assert len(written) == made.weights.size_bytes
    for layer in range(LAYERS):
        ref = stack(made, layer)
        size = record_bytes(Encoding.FP8_BLOCK if fp8 else Encoding.FP4_GROUP, HIDDEN, INNER)
        assert (ref.space, ref.sizes) == (Space.WEIGHT, (EXPERTS, size))
        assert ref.dtype is (DType.F8E4M3 if fp8 else DType.F4E2M1X2)
        assert ref.offset % EXPERT_ALIGNMENT == 0 and ref.strides == (-(-size // 4096) * 4096, 1)
        for expert in range(EXPERTS):
            at = ref.offset + expert * ref.strides[0]
            matrices = (unpack_fp8 if fp8 else unpack_fp4)(written[at : at + size], HIDDEN, INNER)
            for leaf, matrix in zip(("w1", "w3", "w2"), matrices, strict=True):
                if kept == "stored":
                    check_bytes(opened, f"layers.{layer}.ffn.experts.{expert}.{leaf}.weight", matrix)


def check_bytes(opened: Checkpoint, name: str, matrix: StoredMatrix) -> None:
    codes, scales = opened.codes(name), opened.scales(name)
    assert scales is not None
    assert torch.equal(matrix.codes.view(torch.uint8), codes.view(torch.uint8))
    if matrix.scales.dtype == torch.float32:
        assert torch.equal(matrix.scales, decode_e8m0(scales))
    else:
        assert torch.equal(matrix.scales, scales.view(torch.uint8))


def test_what_the_build_quantises_is_packed_like_what_is_stored() -> None:
    """A checkpoint in the released form, and the unquantised one that it was made of."""
    kept, made = plan("fp8_fp4"), plan("none", "fp4")
    ours, theirs = (section(checkpoint("two_even", form), it) for form, it in (("none", made), ("fp8_fp4", kept)))  # type: ignore[arg-type]
    for layer in range(LAYERS):
        first, second = stack(made, layer), stack(kept, layer)
        size = EXPERTS * first.strides[0]
        assert torch.equal(ours[first.offset : first.offset + size], theirs[second.offset : second.offset + size])


@pytest.mark.parametrize(("stored", "kept"), FORMS)
def test_an_expert_is_one_extent_and_three_tensors(stored: Quantization, kept: str) -> None:
    opened, made = checkpoint("two_even", stored), plan(stored, kept)
    packed = [extent for extent in made.weights.extents if extent.expert is not None]
    assert [extent.expert for extent in packed] == [*range(EXPERTS)] * LAYERS
    names = [name for extent in made.weights.extents for name in extent.sources]
    assert set(names) == set(opened.weights)
    for extent in packed:
        prefix = f"layers.{packed.index(extent) // EXPERTS}.ffn.experts.{extent.expert}."
        assert extent.sources == [f"{prefix}{leaf}.weight" for leaf in ("w1", "w3", "w2")]
        assert extent.source == extent.sources[0] and extent.tensors == 3
    errors = ErrorMeter()
    for _ in weight_blocks(opened, made, measure=errors):
        pass
    (experts,) = (total for total in weight_totals(made, errors) if total.kind == "experts")
    assert experts.tensors == 3 * EXPERTS * LAYERS
    assert experts.size_bytes == sum(extent.size_bytes for extent in packed)
    assert (experts.relative_error is None) == (kept == "stored")


@pytest.mark.parametrize(("stored", "kept"), FORMS)
def test_the_plan_computes_what_that_of_several_launches_does(stored: Quantization, kept: str) -> None:
    opened = checkpoint("two_even", stored)
    runs = [
        ReferenceRun(made, opened, slots=2, context=256)
        for made in (plan(stored, kept), plan(stored, kept, layout="checkpoint"))
    ]
    for step in SCHEDULE:
        rows = step_rows(step, opened.config.vocab_size)
        found, expected = (run.step(run.plan.buckets[-1], *rows) for run in runs)
        assert torch.equal(found, expected) and not found.isnan().any()


def test_a_topology_is_a_row_for_each_product() -> None:
    made = plan(topology="pinned", group_sms=40)
    launches = [each for each in made.buckets[0].launches if each.kernel == "placed_experts"]
    refs = [launch.args[6] for launch in launches]
    assert isinstance(refs[0], TensorRef) and refs[0] == refs[1]
    written = section(checkpoint("two_even"), made)
    width = refs[0].sizes[1]
    rows = written[refs[0].offset : refs[0].offset + 8 * width].view(torch.int32).view(2, width).tolist()
    for row, sms in zip(rows, (132, 114), strict=True):
        table = place(ExpertShapes(EXPERTS, HIDDEN, INNER), sms, "pinned", 40).table()
        assert tuple(row[: len(table)]) == table and not any(row[len(table) :])
    constants = {total.encoding: total for total in weight_totals(made, ErrorMeter()) if total.kind == "constants"}
    assert set(constants) == {"f32", "int32"} and constants["int32"].tensors == 1
    (extent,) = (e for e in made.weights.extents if isinstance(e.what, Constant) and e.what.dtype == torch.int32)
    assert extent.sources == []
    opened = checkpoint("two_even")
    rows_of = step_rows(SCHEDULE[0], opened.config.vocab_size)
    found, expected = (
        ReferenceRun(it, opened, slots=2, context=256).step(it.buckets[-1], *rows_of) for it in (made, plan())
    )
    assert torch.equal(found, expected)


def test_scales_that_the_kernels_cannot_use_name_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, made = checkpoint("two_even"), plan()
    name = "layers.1.ffn.experts.3.w3.weight"
    scales = opened.scales(name)
    assert scales is not None
    wide = scales.view(torch.uint8).clone()
    wide[17, 4:8] = torch.tensor([100, 120, 110, 100], dtype=torch.uint8)
    found = Checkpoint.scales
    monkeypatch.setattr(Checkpoint, "scales", lambda self, asked: wide if asked == name else found(self, asked))
    with pytest.raises(CheckpointError, match=f"`{name}` cannot be packed: the scale of row 17, columns 128 to 159"):
        section(opened, made)
