"""The execution plan: what the runtime does for one step, as data.

A plan is a list of launches per bucket over one arena, the layout of the weights and of the state. It can be printed,
run in Python on the reference bodies (`reference_run.py`), costed, and written into an engine.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from dsv4c.graph.annotations import Constant, Parameter, StateLayout
from dsv4c.step_abi import BucketKind, Dim, DType, LaunchFlag, Space

# A stride that depends on a symbolic size: dense over the dimensions after it.
DENSE = -1

DTYPES: dict[torch.dtype, DType] = {
    torch.float32: DType.F32,
    torch.bfloat16: DType.BF16,
    torch.float16: DType.F16,
    torch.float8_e4m3fn: DType.F8E4M3,
    torch.float8_e8m0fnu: DType.F8E8M0,
    torch.uint8: DType.U8,
    torch.int8: DType.I8,
    torch.int32: DType.I32,
    torch.int64: DType.I64,
    torch.float4_e2m1fn_x2: DType.F4E2M1X2,
}
TORCH_DTYPES = {dtype: torch_dtype for torch_dtype, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorRef:
    """A tensor of a launch: where it lies, and its shape as the kernel sees it.

    `offset` is in bytes from the start of the space (of the plane, input or output that `index` names). `dims` says
    which sizes only the run knows; `sizes` then holds the capacity of the bucket (0 where the session decides).
    """

    space: Space
    dtype: DType
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dims: tuple[Dim, ...]
    index: int = 0


Arg = TensorRef | int | float | None


@dataclass(frozen=True)
class KernelVariant:
    """A kernel's source with everything that specialises it: what is compiled to one image of machine code.

    `source` is the file's stem in the folder of its language; `constants` are macros in CUDA C++ and constexpr
    arguments in Triton, sorted by name. `warps` and `stages` count in Triton only, where they decide the code.
    """

    language: Literal["cuda", "triton"]
    source: str
    entry: str
    constants: tuple[tuple[str, int | float | str], ...]
    warps: int = 0
    stages: int = 0


@dataclass(frozen=True)
class KernelCall:
    """A launch of machine code. It gets a pointer for each of `args`, then one to the step's header.

    An operator may take several calls in a row; the first ones hand over through scratch tensors behind the arena, and
    the last one has the operator's outputs at the end of its `args`.
    """

    variant: KernelVariant
    grid: tuple[int, int, int]
    block: int  # threads
    args: tuple[TensorRef, ...]
    shared_bytes: int = 0  # dynamic
    cluster: int = 1
    cooperative: bool = False
    programmatic: bool = False  # starts once every block of the operator's call before has let it; it waits itself


@dataclass(frozen=True)
class Launch:
    """One operator: the arguments of its schema, then its outputs. `calls` where the target compiles kernels."""

    kernel: str
    name: str
    layer: int | None
    flags: LaunchFlag
    args: tuple[Arg, ...]
    outputs: tuple[TensorRef, ...]
    bytes_moved: int
    flops: int
    calls: tuple[KernelCall, ...] = ()


@dataclass(frozen=True)
class BucketPlan:
    """The launches for steps of up to `tokens` rows. `unshared_bytes` is the arena without reuse of memory.

    `sm_count` says for which product the calls were chosen; 0 where it does not matter.
    """

    kind: BucketKind
    tokens: int
    launches: tuple[Launch, ...]
    arena_bytes: int
    unshared_bytes: int
    sm_count: int = 0


@dataclass(frozen=True)
class EntryPoint:
    name: str
    buckets: tuple[BucketPlan, ...]


@dataclass(frozen=True)
class Extent:
    """Bytes of the weight space from one source: a part of a checkpoint tensor, a packed expert, or a constant.

    `source` is the official name, of a packed expert that of its first tensor, and empty for a constant; `expert` is
    the number of a packed one.
    """

    offset: int
    size_bytes: int
    source: str
    what: Parameter | Constant
    expert: int | None = None

    @property
    def sources(self) -> list[str]:
        """All checkpoint tensors that these bytes are made of."""
        if isinstance(self.what, Parameter) and self.what.part == "packed":
            return self.what.source_names(self.expert)
        return [self.source] if self.source else []

    @property
    def tensors(self) -> int:
        """Tensors that reports count here: scales belong to their codes."""
        if isinstance(self.what, Constant):
            return 1
        return 0 if self.what.part == "scales" else len(self.sources)


@dataclass(frozen=True)
class WeightLayout:
    """Where every weight lies. Extents ascend and do not overlap; the gaps are zero."""

    extents: tuple[Extent, ...]
    size_bytes: int


@dataclass(frozen=True)
class ExecutionPlan:
    """All that the runtime needs besides the weights' bytes."""

    entry_points: tuple[EntryPoint, ...]
    weights: WeightLayout
    state: StateLayout
    vocab_size: int
    hidden_size: int
    layer_count: int
    max_context: int
    block_tokens: int
    rollback_rows: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def kernels(self) -> tuple[str, ...]:
        """The operators that the launches use, sorted."""
        return tuple(sorted({launch.kernel for bucket in self.buckets for launch in bucket.launches}))

    @property
    def buckets(self) -> tuple[BucketPlan, ...]:
        return tuple(bucket for entry in self.entry_points for bucket in entry.buckets)
