"""ExecutionPlan -> the PLAN section: fixed records, described in `format.py`."""

import struct
from collections.abc import Iterable

from dsv4c.engine.format import (
    NO_INDEX,
    Arg,
    Bucket,
    EntryPoint,
    Kernel,
    Launch,
    PlanHeader,
    Record,
    State,
    Tensor,
)
from dsv4c.plan import execution_plan as plan_types
from dsv4c.plan.execution_plan import DTYPES, BucketPlan, ExecutionPlan, TensorRef
from dsv4c.step_abi import ArgKind

PLAN_VERSION = 1
_RECORD_ALIGNMENT = 8


class _Strings:
    """Zero-terminated names, each once."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._offsets: dict[str, int] = {}

    def add(self, text: str) -> int:
        if text not in self._offsets:
            self._offsets[text] = len(self.data)
            self.data += text.encode() + b"\0"
        return self._offsets[text]


class _PlanWriter:
    def __init__(self, plan: ExecutionPlan) -> None:
        self.plan = plan
        self.strings = _Strings()
        self.kernels = {name: index for index, name in enumerate(plan.kernels)}
        self.args: list[Arg] = []
        self.tensors: dict[Tensor, int] = {}
        self.launches: list[Launch] = []
        self.buckets: list[Bucket] = []

    def entry_point(self, entry: plan_types.EntryPoint) -> EntryPoint:
        first = len(self.buckets)
        for bucket in entry.buckets:
            self.buckets.append(self.bucket(bucket))
        return EntryPoint(self.strings.add(entry.name), first, len(entry.buckets), 0)

    def bucket(self, bucket: BucketPlan) -> Bucket:
        first = len(self.launches)
        self.launches += [self.launch(launch) for launch in bucket.launches]
        return Bucket(bucket.kind, bucket.tokens, first, len(bucket.launches), bucket.arena_bytes, 0)

    def launch(self, launch: plan_types.Launch) -> Launch:
        first = len(self.args)
        self.args += [self.arg(arg) for arg in (*launch.args, *launch.outputs)]
        return Launch(
            kernel=self.kernels[launch.kernel],
            name=self.strings.add(launch.name),
            layer=NO_INDEX if launch.layer is None else launch.layer,
            flags=launch.flags,
            first_arg=first,
            arg_count=len(self.args) - first,
            output_count=len(launch.outputs),
            cluster=0,
            bytes_moved=launch.bytes_moved,
            flops=launch.flops,
            grid_x=0,
            grid_y=0,
            grid_z=0,
            block_x=0,
            block_y=0,
            block_z=0,
            shared_bytes=0,
            reserved=0,
        )

    def arg(self, arg: plan_types.Arg) -> Arg:
        if arg is None:
            return Arg(ArgKind.NONE, 0, 0)
        if isinstance(arg, TensorRef):
            return Arg(ArgKind.TENSOR, 0, self.tensors.setdefault(_tensor(arg), len(self.tensors)))
        if isinstance(arg, float):
            return Arg(ArgKind.FLOAT, 0, struct.unpack("<q", struct.pack("<d", arg))[0])
        return Arg(ArgKind.INT, 0, arg)

    def states(self) -> list[State]:
        return [
            State(
                name=self.strings.add(plane.name),
                kind=plane.kind,
                dtype=DTYPES[plane.dtype],
                layer=NO_INDEX if plane.layer is None else plane.layer,
                rows=plane.rows,
                ratio=plane.ratio,
                row_bytes=plane.row_bytes,
            )
            for plane in self.plan.state.planes
        ]


def _tensor(ref: TensorRef) -> Tensor:
    missing = 4 - len(ref.sizes)
    return Tensor(
        ref.space,
        ref.dtype,
        len(ref.sizes),
        ref.index,
        ref.offset,
        *(*ref.dims, *[0] * missing),
        *(*ref.sizes, *[1] * missing),
        *(*ref.strides, *[0] * missing),
    )


def encode_plan(plan: ExecutionPlan, sm_count: int = 0) -> bytes:
    """The bytes of the PLAN section. The same plan gives the same bytes."""
    writer = _PlanWriter(plan)
    entries = [writer.entry_point(entry) for entry in plan.entry_points]
    states = writer.states()
    kernels = [Kernel(writer.strings.add(name), NO_INDEX, 0, 0) for name in plan.kernels]
    eos = struct.pack(f"<{len(plan.eos_token_ids)}I", *plan.eos_token_ids)

    body = bytearray(PlanHeader.LAYOUT.size)

    def table(data: bytes) -> int:
        body.extend(bytes(-len(body) % _RECORD_ALIGNMENT))
        offset = len(body)
        body.extend(data)
        return offset

    header = PlanHeader(
        plan_version=PLAN_VERSION,
        world_size=1,
        rank=0,
        sm_count=sm_count,
        vocab_size=plan.vocab_size,
        max_context=plan.max_context,
        block_tokens=plan.block_tokens,
        rollback_rows=plan.rollback_rows,
        hidden_size=plan.hidden_size,
        layer_count=plan.layer_count,
        bos_token_id=NO_INDEX if plan.bos_token_id is None else plan.bos_token_id,
        weight_bytes=plan.weights.size_bytes,
        entry_points=table(_records(entries)),
        entry_point_count=len(entries),
        buckets=table(_records(writer.buckets)),
        bucket_count=len(writer.buckets),
        launches=table(_records(writer.launches)),
        launch_count=len(writer.launches),
        args=table(_records(writer.args)),
        arg_count=len(writer.args),
        tensors=table(_records(writer.tensors)),
        tensor_count=len(writer.tensors),
        states=table(_records(states)),
        state_count=len(states),
        kernels=table(_records(kernels)),
        kernel_count=len(kernels),
        eos_ids=table(eos),
        eos_count=len(plan.eos_token_ids),
        strings=table(bytes(writer.strings.data)),
        strings_bytes=len(writer.strings.data),
    )
    body[: PlanHeader.LAYOUT.size] = header.pack()
    return bytes(body)


def _records(records: Iterable[Record]) -> bytes:
    return b"".join(record.pack() for record in records)
