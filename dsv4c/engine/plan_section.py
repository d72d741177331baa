"""ExecutionPlan -> the PLAN section: fixed records, described in `format.py`.

A launch record is one kernel call. Where the runtime brings the kernels, that is an operator with its arguments; where
they are machine code in the engine, an operator may take several calls, whose arguments are the tensors they point to.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

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
from dsv4c.plan.execution_plan import DTYPES, BucketPlan, ExecutionPlan, KernelCall, KernelVariant, TensorRef
from dsv4c.step_abi import ArgKind, LaunchFlag

PLAN_VERSION = 1
_RECORD_ALIGNMENT = 8


@dataclass(frozen=True)
class KernelImage:
    """Where a kernel's machine code lies in the KERNELS section, and what a launch of it needs to know."""

    offset: int
    size_bytes: int
    symbol: str
    shared_bytes: int = 0  # dynamic, where the compiler decides it


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
    def __init__(self, plan: ExecutionPlan, images: Mapping[KernelVariant, KernelImage]) -> None:
        self.plan = plan
        self.images = images
        self.strings = _Strings()
        # An operator of the runtime, or an operator and the code it runs.
        self.kernels: dict[tuple[str, KernelVariant | None], int] = {}
        if not images:
            self.kernels = {(name, None): index for index, name in enumerate(plan.kernels)}
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
        for launch in bucket.launches:
            if launch.calls:
                self.launches += [self.call(launch, call, call is launch.calls[-1]) for call in launch.calls]
            else:
                self.launches.append(self.operator(launch))
        count = len(self.launches) - first
        return Bucket(bucket.kind, bucket.tokens, first, count, bucket.arena_bytes, bucket.sm_count, 0)

    def operator(self, launch: plan_types.Launch) -> Launch:
        """The record of a kernel that the runtime brings."""
        return self.record(launch, (*launch.args, *launch.outputs), None, launch.flags, True)

    def call(self, launch: plan_types.Launch, call: KernelCall, last: bool) -> Launch:
        """The record of one call; outputs and what the operator costs are said once, by its last."""
        flags = launch.flags
        if not last:
            flags |= LaunchFlag.STAGE
        if call.cooperative:
            flags |= LaunchFlag.COOPERATIVE
        if call.programmatic:
            flags |= LaunchFlag.PROGRAMMATIC
        shared = call.shared_bytes or self.images[call.variant].shared_bytes
        return replace(
            self.record(launch, call.args, call.variant, flags, last),
            cluster=call.cluster,
            grid_x=call.grid[0],
            grid_y=call.grid[1],
            grid_z=call.grid[2],
            block_x=call.block,
            block_y=1,
            block_z=1,
            shared_bytes=shared,
        )

    def record(
        self,
        launch: plan_types.Launch,
        args: Iterable[plan_types.Arg],
        variant: KernelVariant | None,
        flags: LaunchFlag,
        last: bool,
    ) -> Launch:
        first = len(self.args)
        self.args += map(self.arg, args)
        return Launch(
            kernel=self.kernels.setdefault((launch.kernel, variant), len(self.kernels)),
            name=self.strings.add(launch.name),
            layer=NO_INDEX if launch.layer is None else launch.layer,
            flags=flags,
            first_arg=first,
            arg_count=len(self.args) - first,
            output_count=len(launch.outputs) if last else 0,
            cluster=0,
            bytes_moved=launch.bytes_moved if last else 0,
            flops=launch.flops if last else 0,
            grid_x=0,
            grid_y=0,
            grid_z=0,
            block_x=0,
            block_y=0,
            block_z=0,
            shared_bytes=0,
            reserved=0,
        )

    def kernel_records(self) -> list[Kernel]:
        """The table of kernels, once every launch has been recorded."""
        return [self.kernel(name, variant) for name, variant in self.kernels]

    def kernel(self, name: str, variant: KernelVariant | None) -> Kernel:
        if variant is None:
            return Kernel(self.strings.add(name), NO_INDEX, 0, 0)
        image = self.images[variant]
        return Kernel(self.strings.add(name), self.strings.add(image.symbol), image.offset, image.size_bytes)

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


def encode_plan(plan: ExecutionPlan, images: Mapping[KernelVariant, KernelImage] | None = None) -> bytes:
    """The bytes of the PLAN section: the same for the same plan. `images` has every variant that the plan calls."""
    writer = _PlanWriter(plan, images or {})
    entries = [writer.entry_point(entry) for entry in plan.entry_points]
    states = writer.states()
    kernels = writer.kernel_records()
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
        sm_count=0,
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
