"""Where the weights lie."""

import math

import pytest

from dsv4c.compiler import weight_blocks
from dsv4c.graph.annotations import Constant, Numerics, Parameter
from dsv4c.graph.parameters import WeightReader
from dsv4c.plan.execution_plan import Extent, TensorRef
from dsv4c.plan.reference_run import extent_bytes
from dsv4c.plan.weight_layout import ALIGNMENT, EXPERT_ALIGNMENT
from dsv4c.step_abi import Space
from tests.fixtures import Quantization
from tests.graph.small_models import checkpoint, plan

LAYOUTS: list[tuple[str, Numerics, Quantization]] = [
    ("narrow", "exact", "fp8_fp4"),
    ("partial_blocks", "exact", "fp8"),
    ("partial_blocks", "reference", "bf16"),
]


@pytest.mark.parametrize(("name", "numerics", "quantization"), LAYOUTS)
def test_extents_ascend_without_overlap(name: str, numerics: Numerics, quantization: Quantization) -> None:
    opened, weights = checkpoint(name, quantization), plan(name, numerics, quantization).weights
    end = 0
    for extent in weights.extents:
        assert extent.offset >= end and extent.size_bytes > 0
        # Only alignment leaves gaps, and the largest is that of a page.
        assert extent.offset - end < EXPERT_ALIGNMENT
        end = extent.offset + extent.size_bytes
        assert extent_bytes(WeightReader(opened), extent).numel() == extent.size_bytes
    assert weights.size_bytes == -(-end // EXPERT_ALIGNMENT) * EXPERT_ALIGNMENT


@pytest.mark.parametrize(("name", "numerics", "quantization"), LAYOUTS)
def test_every_weight_is_there_once(name: str, numerics: Numerics, quantization: Quantization) -> None:
    opened, weights = checkpoint(name, quantization), plan(name, numerics, quantization).weights
    parts = [(e.source, e.what.part) for e in weights.extents if isinstance(e.what, Parameter)]
    scaled = [(info.name, "scales") for info in opened.weights.values() if info.scales is not None]
    assert sorted(parts) == sorted([(source, "codes") for source in opened.weights] + scaled)
    constants = [extent for extent in weights.extents if isinstance(extent.what, Constant)]
    assert len(constants) == 2 and all(extent.size_bytes == 2 * opened.config.rotary_dim for extent in constants)
    # Codes lie as they are in the checkpoint.
    for extent in weights.extents:
        if isinstance(extent.what, Parameter) and extent.what.part == "codes":
            codes = opened.codes(extent.source)
            assert extent.size_bytes == codes.numel() * codes.element_size()


@pytest.mark.parametrize(("name", "numerics", "quantization"), LAYOUTS)
def test_an_expert_is_one_run_of_pages(name: str, numerics: Numerics, quantization: Quantization) -> None:
    opened, weights = checkpoint(name, quantization), plan(name, numerics, quantization).weights
    for layer in range(opened.config.num_hidden_layers):
        ends = []
        for expert in range(opened.config.n_routed_experts):
            prefix = f"layers.{layer}.ffn.experts.{expert}."
            blob = [(i, e) for i, e in enumerate(weights.extents) if e.source.startswith(prefix)]
            numbers = [i for i, _ in blob]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            leaves = [(e.source.removeprefix(prefix).removesuffix(".weight"), part(e)) for _, e in blob]
            forms = ("codes",) if quantization == "bf16" else ("codes", "scales")
            assert leaves == [(w, f) for pair in (("w1", "w3"), ("w2",)) for f in forms for w in pair]
            assert blob[0][1].offset % EXPERT_ALIGNMENT == 0
            ends.append((blob[0][1].offset, blob[-1][1].offset + blob[-1][1].size_bytes))
        # The experts of a layer follow each other, all as long as the first.
        stride = ends[1][0] - ends[0][0]
        assert stride % EXPERT_ALIGNMENT == 0 and stride - (ends[0][1] - ends[0][0]) < EXPERT_ALIGNMENT
        assert [start for start, _ in ends] == [ends[0][0] + i * stride for i in range(len(ends))]


def part(extent: Extent) -> str:
    assert isinstance(extent.what, Parameter)
    return extent.what.part


@pytest.mark.parametrize(("name", "numerics", "quantization"), LAYOUTS)
def test_launches_read_whole_weights(name: str, numerics: Numerics, quantization: Quantization) -> None:
    made = plan(name, numerics, quantization)
    starts = {extent.offset for extent in made.weights.extents}
    for launch in made.buckets[0].launches:
        for arg in launch.args:
            if isinstance(arg, TensorRef) and arg.space is Space.WEIGHT:
                assert arg.offset in starts and arg.offset % ALIGNMENT == 0
                reach = sum((n - 1) * step for n, step in zip(arg.sizes, arg.strides, strict=True)) + 1
                assert arg.offset + reach * arg.dtype.size_bytes <= made.weights.size_bytes
                assert math.prod(arg.sizes) > 0


def test_the_section_is_written_in_the_order_of_the_extents() -> None:
    opened, made = checkpoint("narrow"), plan("narrow", "exact")
    section = b"".join(weight_blocks(opened, made))
    assert len(section) == made.weights.size_bytes
    end = 0
    for extent in made.weights.extents:
        assert section[end : extent.offset] == bytes(extent.offset - end)
        end = extent.offset + extent.size_bytes
        assert section[extent.offset : end] == bytes(extent_bytes(WeightReader(opened), extent).numpy())
