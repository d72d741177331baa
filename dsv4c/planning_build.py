"""Disk and memory that a build takes."""

from typing import Any

from dsv4c.checkpoint.formats import Encoding
from dsv4c.engine.format import CHUNK_BYTES, SECTION_ALIGN, ChunkHeader
from dsv4c.graph.annotations import Parameter
from dsv4c.plan.execution_plan import TensorRef
from dsv4c.planning_layers import ModelPlan
from dsv4c.planning_source import PlanSource
from dsv4c.step_abi import Space

# Of a Python process with torch that has built a graph; measured on x86-64 (tests/test_build_memory.py).
_BUILD_BASE_BYTES = 450_000_000
# Manifest and, with goldens, a line of JSON a launch and step.
_MANIFEST_BYTES = 8192
_GOLDEN_BYTES_PER_LAUNCH = 150


def build_needs(source: PlanSource, plan: ModelPlan) -> dict[str, Any]:
    """Disk for the engine, and anonymous memory of the build: an estimate, as the goldens run on slow references."""
    launches = max(bucket.launches for bucket in plan.buckets)
    chunks = ChunkHeader.LAYOUT.size + 32 * -(-plan.weight_bytes // CHUNK_BYTES)
    goldens = 2 * launches * _GOLDEN_BYTES_PER_LAUNCH
    sections = (plan.plan_section_bytes, _MANIFEST_BYTES, source.tokenizer_bytes, chunks, SECTION_ALIGN)
    disk = plan.weight_bytes + sum(-(-size // SECTION_ALIGN) * SECTION_ALIGN for size in sections)
    quantised = _quantising_bytes(plan)
    return {
        "disk_bytes": disk + goldens,
        "disk_bytes_without_goldens": disk,
        "memory_bytes": _BUILD_BASE_BYTES + max(quantised, _golden_bytes(plan)),
        "memory_bytes_without_goldens": _BUILD_BASE_BYTES + quantised,
    }


def _quantising_bytes(plan: ModelPlan) -> int:
    """A tensor that the build quantises is decoded to float32, and three more of that size come and go."""
    sizes = [
        extent.size_bytes * (8 if extent.what.stored_as in (Encoding.FP4_GROUP, Encoding.INT4_GROUP) else 4)
        for extent in plan.reduced.weights.extents
        if isinstance(extent.what, Parameter) and extent.what.quantization
    ]
    return 4 * max(sizes, default=0)


def _golden_bytes(plan: ModelPlan) -> int:
    """The largest launch of the reference run: it copies each weight, with what lies between its experts."""

    def copied(ref: TensorRef) -> int:
        return sum((size - 1) * abs(step) for size, step in zip(ref.sizes, ref.strides, strict=True)) + 1

    return max(
        sum(
            copied(arg) * arg.dtype.size_bytes * (1 if len(arg.sizes) > 2 else 3)
            for arg in launch.args
            if isinstance(arg, TensorRef) and arg.space is Space.WEIGHT
        )
        for launch in plan.reduced.buckets[0].launches
    )
