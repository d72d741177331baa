"""The hand-made engine for a GPU: every launch a kernel call whose image the fake driver (fake_cuda) understands.

An image is text: for each entry the operator it computes and all arguments of its schema but the pointers, which the
launches hand over, as a real kernel has them compiled in. The numbers are therefore those of the cpu engine.
"""

import struct
from collections.abc import Sequence
from dataclasses import replace

from dsv4c.engine.format import Arg, Kernel, Launch, Tensor
from dsv4c.step_abi import ArgKind, Dim, DType, Input, LaunchFlag, Space
from tests.runtime.hand_engine import MIXED_TOKENS, Parts, Shape, hand_parts, tensor

SMS = (114, 132)
# Behind the arena of every bucket: a copy of the attention's queries, and the runs of the step.
SCRATCH_BYTES, RUN_BYTES = 256, 16 * max(MIXED_TOKENS)
EXTRA_PARAMETERS = {"embedding": 2}  # as a Triton kernel has them


def _describe(arg: Arg, tensors: list[Tensor]) -> str:
    if arg.kind == ArgKind.NONE:
        return "none"
    if arg.kind == ArgKind.INT:
        return f"int {arg.value}"
    if arg.kind == ArgKind.FLOAT:
        return f"float {arg.value}"
    t = tensors[arg.value]
    dense = t.space in (Space.INPUT, Space.OUTPUT)
    words = [f"tensor {t.dtype} {int(t.space == Space.INPUT and t.index == Input.MASK)} {t.ndim}"]
    for i in range(4):
        stride = -1 if dense else getattr(t, f"stride_{i}")
        words.append(f"{getattr(t, f'dim_{i}')} {getattr(t, f'size_{i}')} {stride}")
    return " ".join(words)


class _Writer:
    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.cpu_args = parts.args
        self.cpu_kernels = parts.kernels
        self.launches: list[Launch] = []
        self.args: list[Arg] = []
        self.kernels: list[Kernel] = []
        self.images: dict[bytes, int] = {}
        self.image_bytes = b""

    def image(self, entry: str, operator: str, args: list[Arg]) -> bytes:
        """Of one kernel; `shared` bytes are static."""
        lines = [_describe(arg, self.parts.tensors) for arg in args]
        head = f"kernel {entry} {operator} {EXTRA_PARAMETERS.get(operator, 0)} 1024 {len(args)}"
        return "\n".join(["fake-cubin", head, *lines, "end\n"]).encode()

    def kernel(self, operator: str, args: list[Arg]) -> int:
        entry = f"{operator}_kernel"
        image = self.image(entry, operator, args)
        if image not in self.images:
            self.images[image] = len(self.image_bytes)
            self.image_bytes += image
        name = self.parts.string(operator)
        record = Kernel(name, self.parts.string(entry), self.images[image], len(image))
        if record not in self.kernels:
            self.kernels.append(record)
        return self.kernels.index(record)

    def call(self, like: Launch, operator: str, args: list[Arg], outputs: int, flags: int = 0, shared: int = 0) -> None:
        pointers = [arg for arg in args if arg.kind == ArgKind.TENSOR]
        cluster = 2 if operator == "linear" else 1
        self.launches.append(
            replace(
                like,
                kernel=self.kernel(operator, args),
                flags=like.flags | flags,
                first_arg=len(self.args),
                arg_count=len(pointers),
                output_count=outputs,
                cluster=cluster,
                grid_x=4,
                grid_y=1,
                grid_z=1,
                block_x=64,
                block_y=1,
                block_z=1,
                shared_bytes=shared,
            )
        )
        self.args += pointers

    def launch(self, launch: Launch, tokens: int, arena_bytes: int) -> None:
        parts = self.parts
        args = self.cpu_args[launch.first_arg : launch.first_arg + launch.arg_count]
        operator = parts.strings[self.cpu_kernels[launch.kernel].name :].split(b"\0")[0].decode()
        if operator == "attention":
            # In two calls, which hand over through scratch.
            queries = args[0]
            dense = parts.tensors[queries.value]
            scratch = self.tensor(replace(dense, offset=arena_bytes))
            self.call(launch, "copy", [queries, scratch], 0, LaunchFlag.STAGE)
            flag = LaunchFlag.COOPERATIVE if tokens in MIXED_TOKENS else LaunchFlag.PROGRAMMATIC
            self.call(launch, operator, [scratch, *args[1:]], launch.output_count, flag)
            return
        self.call(launch, operator, args, launch.output_count, shared=100_000 if operator == "compress" else 0)

    def runs(self, tokens: int, arena_bytes: int) -> None:
        """A launch without a counterpart on the cpu, whose output a trace shows."""
        output = tensor(Space.ARENA, DType.I32, [(Dim.TOKENS, tokens), 4], arena_bytes + SCRATCH_BYTES)
        like = replace(self.launches[-1], name=self.parts.string("runs_node"), flags=0)
        self.call(like, "runs", [self.tensor(output)], 1)

    def tensor(self, record: Tensor) -> Arg:
        tensors = self.parts.tensors
        if record not in tensors:
            tensors.append(record)
        return Arg(ArgKind.TENSOR, 0, tensors.index(record))


def add_placed_experts(parts: Parts, table: Sequence[int], experts: int, groups: int, layer: int = 3) -> None:
    """Two calls of `placed_experts` at the end of the last bucket, over a topology table; not to be run."""

    def weight(dtype: DType, shape: Shape, data: bytes) -> Tensor:
        parts.weights += bytes(-len(parts.weights) % 64)
        made = tensor(Space.WEIGHT, dtype, shape, len(parts.weights))
        parts.weights += data
        return made

    def call(tensors: list[Tensor], outputs: int, flags: int) -> None:
        args = [writer.tensor(each) for each in tensors]
        writer.call(replace(like, flags=0), "placed_experts", args, outputs, flags)

    writer = _Writer(parts)
    writer.launches, writer.args, writer.kernels = parts.launches, parts.args, parts.kernels
    writer.image_bytes = parts.images
    like = replace(parts.launches[-1], name=parts.string(f"l{layer}_placed_experts"), layer=layer)
    ranks = weight(DType.I32, [len(table)], struct.pack(f"<{len(table)}i", *table))
    packed = weight(DType.F4E2M1X2, [experts, 16], bytes(16 * experts))
    heads = tensor(Space.ARENA, DType.I32, [groups + 1])
    call([ranks, heads], 0, LaunchFlag.STAGE)
    call([heads, ranks, packed, tensor(Space.ARENA, DType.F32, [4])], 1, LaunchFlag.PROGRAMMATIC)
    parts.images = writer.image_bytes
    bucket = parts.buckets[-1]
    parts.edit("buckets", -1, launch_count=bucket.launch_count + 2)


def cuda_parts(sm_counts: tuple[int, ...] = SMS, counting: bool = False) -> Parts:
    parts = hand_parts(counting)
    writer = _Writer(parts)
    buckets = []
    for bucket in parts.buckets:
        first = len(writer.launches)
        for launch in parts.launches[bucket.first_launch : bucket.first_launch + bucket.launch_count]:
            writer.launch(launch, bucket.tokens, bucket.arena_bytes)
        writer.runs(bucket.tokens, bucket.arena_bytes)
        arena_bytes = bucket.arena_bytes + SCRATCH_BYTES + RUN_BYTES
        count = len(writer.launches) - first
        buckets.append(replace(bucket, first_launch=first, launch_count=count, arena_bytes=arena_bytes))
    parts.buckets = [replace(bucket, sm_count=sm_count) for sm_count in sm_counts for bucket in buckets]
    parts.entry_points = [replace(parts.entry_points[0], bucket_count=len(parts.buckets))]
    parts.launches, parts.args, parts.kernels = writer.launches, writer.args, writer.kernels
    parts.images = writer.image_bytes
    parts.header["arch"] = b"sm_90a"
    return parts
