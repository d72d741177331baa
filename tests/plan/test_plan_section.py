"""The records of the PLAN section hold the plan, and nothing is lost."""

import struct
from dataclasses import replace
from typing import Any

import pytest

from dsv4c.engine import format as records
from dsv4c.engine.format import NO_INDEX
from dsv4c.engine.plan_section import PLAN_VERSION, KernelImage, encode_plan
from dsv4c.graph.annotations import Numerics
from dsv4c.kernels.select.selection import cuda_variant
from dsv4c.plan.execution_plan import DTYPES, Arg, EntryPoint, ExecutionPlan, KernelCall, TensorRef
from dsv4c.step_abi import ArgKind, BucketKind, Dim, DType, LaunchFlag, Space
from tests.graph.small_models import plan

PLANS: list[tuple[str, Numerics]] = [("narrow", "reference"), ("one_layer", "exact")]

COUNTS = {"launches": "launch"}  # the field of a table's length, where it is not its name without the s


class Section:
    """The tables of a PLAN section, read record by record."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.header = records.PlanHeader.unpack(data)

    def table(self, record: Any, name: str) -> list[Any]:
        offset = getattr(self.header, name)
        count = getattr(self.header, f"{COUNTS.get(name, name[:-1])}_count")
        assert offset % 8 == 0
        return [record.unpack(self.data, offset + i * record.LAYOUT.size) for i in range(count)]

    def string(self, offset: int) -> str:
        start = self.header.strings + offset
        assert start < self.header.strings + self.header.strings_bytes
        return self.data[start : self.data.index(b"\0", start)].decode()

    def arg(self, index: int) -> Arg:
        record = self.table(records.Arg, "args")[index]
        assert record.reserved == 0
        if record.kind == ArgKind.NONE:
            return None
        if record.kind == ArgKind.FLOAT:
            return struct.unpack("<d", struct.pack("<q", record.value))[0]  # type: ignore[no-any-return]
        if record.kind == ArgKind.INT:
            return int(record.value)
        return self.tensor(record.value)

    def tensor(self, index: int) -> TensorRef:
        t = self.table(records.Tensor, "tensors")[index]
        sizes = (t.size_0, t.size_1, t.size_2, t.size_3)
        strides = (t.stride_0, t.stride_1, t.stride_2, t.stride_3)
        dims = (t.dim_0, t.dim_1, t.dim_2, t.dim_3)
        assert sizes[t.ndim :] == (1,) * (4 - t.ndim) and strides[t.ndim :] == dims[t.ndim :] == (0,) * (4 - t.ndim)
        kinds = tuple(Dim(dim) for dim in dims[: t.ndim])
        place = Space(t.space), DType(t.dtype), t.offset
        return TensorRef(*place, sizes[: t.ndim], strides[: t.ndim], kinds, t.index)


@pytest.fixture(scope="module", params=PLANS, ids="-".join)
def made(request: pytest.FixtureRequest) -> ExecutionPlan:
    return plan(*request.param)


@pytest.fixture(scope="module")
def section(made: ExecutionPlan) -> Section:
    return Section(encode_plan(made))


def test_header(made: ExecutionPlan, section: Section) -> None:
    header = section.header
    assert (header.plan_version, header.world_size, header.rank, header.sm_count) == (PLAN_VERSION, 1, 0, 0)
    for name in ("vocab_size", "max_context", "block_tokens", "rollback_rows", "hidden_size", "layer_count"):
        assert getattr(header, name) == getattr(made, name)
    assert header.bos_token_id == made.bos_token_id and header.weight_bytes == made.weights.size_bytes
    eos = struct.unpack_from(f"<{header.eos_count}I", section.data, header.eos_ids)
    assert eos == made.eos_token_ids
    assert header.strings + header.strings_bytes == len(section.data)


def test_launches_and_their_arguments(made: ExecutionPlan, section: Section) -> None:
    kernels = section.table(records.Kernel, "kernels")
    assert tuple(section.string(kernel.name) for kernel in kernels) == made.kernels
    assert all(kernel.entry == NO_INDEX and not kernel.image_bytes for kernel in kernels)
    (entry,) = section.table(records.EntryPoint, "entry_points")
    assert (section.string(entry.name), entry.first_bucket, entry.bucket_count) == ("main", 0, len(made.buckets))
    args, tensors = section.table(records.Arg, "args"), section.table(records.Tensor, "tensors")
    assert len(set(tensors)) == len(tensors)
    launches = section.table(records.Launch, "launches")
    known: dict[int, TensorRef] = {index: section.tensor(index) for index in range(len(tensors))}
    at = argument = 0
    for bucket, found in zip(made.buckets, section.table(records.Bucket, "buckets"), strict=True):
        assert (BucketKind(found.kind), found.tokens, found.arena_bytes) == (
            bucket.kind,
            bucket.tokens,
            bucket.arena_bytes,
        )
        assert (found.first_launch, found.launch_count) == (at, len(bucket.launches))
        for launch in bucket.launches:
            record = launches[at]
            assert made.kernels[record.kernel] == launch.kernel and section.string(record.name) == launch.name
            assert record.layer == (NO_INDEX if launch.layer is None else launch.layer)
            assert LaunchFlag(record.flags) == launch.flags
            assert (record.bytes_moved, record.flops) == (launch.bytes_moved, launch.flops)
            expected = (*launch.args, *launch.outputs)
            assert (record.first_arg, record.arg_count) == (argument, len(expected))
            assert record.output_count == len(launch.outputs)
            for index, arg in enumerate(expected, start=argument):
                if isinstance(arg, TensorRef):
                    assert args[index].kind == ArgKind.TENSOR and known[args[index].value] == arg
            at, argument = at + 1, argument + len(expected)
    assert (at, argument) == (len(launches), len(args))


def test_scalars_keep_their_type_and_bits(made: ExecutionPlan, section: Section) -> None:
    bucket = made.buckets[0]
    records_of = section.table(records.Launch, "launches")
    seen = set()
    for launch, record in zip(bucket.launches, records_of, strict=False):
        for index, arg in enumerate(launch.args):
            if not isinstance(arg, TensorRef):
                found = section.arg(record.first_arg + index)
                assert type(found) is type(arg) and found == arg
                seen.add(type(arg))
    assert seen == {int, float, type(None)}


def test_state_planes(made: ExecutionPlan, section: Section) -> None:
    for plane, found in zip(made.state.planes, section.table(records.State, "states"), strict=True):
        assert section.string(found.name) == plane.name
        assert (found.kind, found.dtype, found.layer) == (plane.kind, DTYPES[plane.dtype], plane.layer)
        assert (found.rows, found.ratio, found.row_bytes) == (plane.rows, plane.ratio, plane.row_bytes)


def test_a_model_without_a_first_token() -> None:
    made = replace(plan("one_layer", "exact"), bos_token_id=None, eos_token_ids=())
    header = Section(encode_plan(made)).header
    assert (header.bos_token_id, header.eos_count) == (NO_INDEX, 0)


def test_the_same_plan_gives_the_same_bytes(made: ExecutionPlan) -> None:
    assert encode_plan(made) == encode_plan(made)


def test_kernel_calls_become_launches_of_their_own() -> None:
    made = plan("one_layer", "reference")
    bucket = made.buckets[0]
    first, second = cuda_variant("rows", "one", WIDTH=8), cuda_variant("rows", "two")
    called = bucket.launches[0]
    (out,) = called.outputs
    calls = (
        KernelCall(first, (3, 2, 1), 64, (out,), shared_bytes=512),
        KernelCall(second, (1, 1, 1), 128, (out, out), cooperative=True, cluster=2, programmatic=True),
    )
    launch = replace(called, flags=LaunchFlag.HEAD, calls=calls)
    bucket = replace(bucket, launches=(launch,), sm_count=114)
    made = replace(made, entry_points=(EntryPoint("main", (bucket,)),))
    images = {first: KernelImage(0, 100, "one"), second: KernelImage(128, 50, "two", shared_bytes=64)}
    section = Section(encode_plan(made, images))
    kernels = section.table(records.Kernel, "kernels")
    assert [section.string(kernel.name) for kernel in kernels] == [launch.kernel] * 2
    assert [(section.string(k.entry), k.image_offset, k.image_bytes) for k in kernels] == [
        ("one", 0, 100),
        ("two", 128, 50),
    ]
    (found,) = section.table(records.Bucket, "buckets")
    assert (found.launch_count, found.sm_count) == (2, 114)
    stage, last = section.table(records.Launch, "launches")
    assert LaunchFlag(stage.flags) == LaunchFlag.HEAD | LaunchFlag.STAGE
    assert LaunchFlag(last.flags) == LaunchFlag.HEAD | LaunchFlag.COOPERATIVE | LaunchFlag.PROGRAMMATIC
    assert (stage.grid_x, stage.grid_y, stage.grid_z, stage.block_x, stage.block_y) == (3, 2, 1, 64, 1)
    assert (stage.shared_bytes, last.shared_bytes, stage.cluster, last.cluster) == (512, 64, 1, 2)
    assert (stage.arg_count, stage.output_count, last.arg_count, last.output_count) == (1, 0, 2, 1)
    assert (stage.bytes_moved, last.bytes_moved) == (0, launch.bytes_moved)
    assert section.string(stage.name) == section.string(last.name) == launch.name
