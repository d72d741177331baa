"""Disk and memory that a build takes."""

import math
from typing import Any

from dsv4c.checkpoint.formats import Encoding
from dsv4c.engine.format import CHUNK_BYTES, SECTION_ALIGN, ChunkHeader
from dsv4c.engine.goldens import SAMPLES
from dsv4c.graph.annotations import Parameter
from dsv4c.kernels.assign import plan_variants
from dsv4c.plan.execution_plan import TensorRef
from dsv4c.planning.layers import ModelPlan
from dsv4c.planning.source import PlanSource
from dsv4c.step_abi import Space

# Anonymous memory of a build of the bundled model, and what a tensor of the checkpoint adds; measured on x86-64.
_BUILD_BASE_BYTES = 270_000_000
_BYTES_PER_TENSOR = 2500
_MANIFEST_BYTES = 8192
# Of a compiled kernel: its image and its part of the manifest; averages over V4-Flash.
_IMAGE_BYTES = 21_000
# JSON of the goldens: a launch, a result of it, and a value of that.
_GOLDEN_LAUNCH, _GOLDEN_OUTPUT, _GOLDEN_VALUE = 130, 75, 28.5
_GOLDEN_STEPS = 2


def build_needs(source: PlanSource, plan: ModelPlan) -> dict[str, Any]:
    """Disk for the engine, and anonymous memory of the build: an estimate, as the goldens run on slow references."""
    chunks = ChunkHeader.LAYOUT.size + 32 * -(-plan.weight_bytes // CHUNK_BYTES)
    goldens = _goldens_section_bytes(plan)
    code = _IMAGE_BYTES * len(plan_variants(plan.reduced))
    sections = (plan.plan_section_bytes, code, _MANIFEST_BYTES, source.tokenizer_bytes, chunks, SECTION_ALIGN)
    disk = plan.weight_bytes + sum(-(-size // SECTION_ALIGN) * SECTION_ALIGN for size in sections)
    base = _BUILD_BASE_BYTES + _BYTES_PER_TENSOR * len(source.weights)
    quantised = _quantising_bytes(plan)
    return {
        "disk_bytes": disk + goldens,
        "disk_bytes_without_goldens": disk,
        "memory_bytes": base + max(quantised, _golden_run_bytes(plan)),
        "memory_bytes_without_goldens": base + quantised,
    }


def _goldens_section_bytes(plan: ModelPlan) -> int:
    """About the size of the GOLDENS section: up to SAMPLES values of every result in each of two steps."""
    size = 0.0
    for launch in plan.reduced.buckets[0].launches:
        values = sum(min(math.prod(ref.sizes), SAMPLES) for ref in launch.outputs)
        one = _GOLDEN_LAUNCH + _GOLDEN_OUTPUT * len(launch.outputs) + _GOLDEN_VALUE * values
        size += plan.count(launch.layer) * one
    return round(_GOLDEN_STEPS * size)


def _quantising_bytes(plan: ModelPlan) -> int:
    """A tensor that the build quantises is decoded to float32, and three more of that size come and go.

    Of a packed expert, what was made of its tensors waits for the last of them, and then becomes the record.
    """
    needs = [0]
    for extent in plan.reduced.weights.extents:
        if isinstance(extent.what, Parameter) and extent.what.quantization:
            codes = extent.size_bytes // len(extent.sources)
            decoded = codes * (8 if extent.what.stored_as in (Encoding.FP4_GROUP, Encoding.INT4_GROUP) else 4)
            waiting = 2 * extent.size_bytes if extent.what.part == "packed" else 0
            needs.append(4 * decoded + waiting)
    return max(needs)


def _golden_run_bytes(plan: ModelPlan) -> int:
    """The largest launch of the reference run: it copies each weight, with what lies between its experts.

    Matrices are decoded whole, experts one by one.
    """

    def copied(ref: TensorRef) -> int:
        return sum((size - 1) * abs(step) for size, step in zip(ref.sizes, ref.strides, strict=True)) + 1

    return max(
        sum(
            copied(arg) * arg.dtype.size_bytes * (1 if _is_stack(plan, arg) else 3)
            for arg in launch.args
            if isinstance(arg, TensorRef) and arg.space is Space.WEIGHT
        )
        for launch in plan.reduced.buckets[0].launches
    )


def _is_stack(plan: ModelPlan, ref: TensorRef) -> bool:
    what = plan.extents_by_offset[ref.offset].what
    return isinstance(what, Parameter) and what.experts > 0
