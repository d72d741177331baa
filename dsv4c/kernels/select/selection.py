"""What a selector works with: it turns one operator's launch into kernel calls for a target.

A selector is a function of the launch and a `Selection`; it decides the kernel, what specialises it and the grid.
Sizes that only the run knows (rows, slots, context) never reach a kernel as constants: it reads them from the step's
header, and the grid covers the capacity of the bucket.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

from dsv4c.plan.execution_plan import Arg, KernelCall, KernelVariant, Launch, TensorRef
from dsv4c.step_abi import Dim, DType, Space
from dsv4c.target import Target

ARENA_ALIGN = 256

# The C++ names of element types in the kernels (dsv4c/kernels/cuda/dtype.cuh).
CUDA_TYPES: Mapping[DType, str] = {
    DType.F32: "float",
    DType.BF16: "bf16",
    DType.F16: "f16",
    DType.F8E4M3: "e4m3",
    DType.F8E8M0: "e8m0",
    DType.U8: "u8",
    DType.I8: "i8",
    DType.I32: "int",
    DType.I64: "i64",
    DType.F4E2M1X2: "e2m1x2",
}


@dataclass
class Selection:
    """Where a launch runs, and the scratch memory its calls ask for.

    `tokens` is the capacity of the bucket. Scratch lies behind the bucket's arena and is shared by all its operators,
    which run one after the other: what a call leaves there is lost after the operator's last call.
    """

    target: Target
    sm_count: int
    tokens: int
    arena_bytes: int
    scratch_bytes: int = field(default=0, init=False)  # of the operator in hand

    @property
    def scratch_start(self) -> int:
        return -(-self.arena_bytes // ARENA_ALIGN) * ARENA_ALIGN

    def scratch(self, dtype: DType, *sizes: int) -> TensorRef:
        """A dense scratch tensor, aligned to 256 bytes."""
        start = self.scratch_start + self.scratch_bytes
        size = prod(sizes) * dtype.size_bytes
        self.scratch_bytes += -(-size // ARENA_ALIGN) * ARENA_ALIGN
        strides = tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))
        return TensorRef(Space.ARENA, dtype, start, sizes, strides, (Dim.FIXED,) * len(sizes))


Selector = Callable[[Launch, Selection], list[KernelCall]]


def cuda_variant(source: str, entry: str, **constants: int | float | str) -> KernelVariant:
    """Kernel `entry` of `cuda/<source>.cu`, specialised by macros."""
    return KernelVariant("cuda", source, entry, tuple(sorted(constants.items())))


def triton_variant(source: str, warps: int, stages: int, **constants: int | float | str) -> KernelVariant:
    """The kernel `source` of `triton/<source>.py` with constexpr arguments."""
    return KernelVariant("triton", source, source, tuple(sorted(constants.items())), warps, stages)


def tensor_arg(launch: Launch, index: int) -> TensorRef:
    """Argument `index` of the operator's schema, which must be a tensor."""
    arg = launch.args[index]
    assert isinstance(arg, TensorRef), (launch.name, index)
    return arg


def optional_tensor(launch: Launch, index: int) -> TensorRef | None:
    arg = launch.args[index]
    assert arg is None or isinstance(arg, TensorRef), (launch.name, index)
    return arg


def int_arg(launch: Launch, index: int) -> int:
    arg = launch.args[index]
    assert isinstance(arg, int), (launch.name, index)
    return arg


def float_arg(launch: Launch, index: int) -> float:
    arg: Arg = launch.args[index]
    assert isinstance(arg, int | float), (launch.name, index)
    return float(arg)


def cuda_type(tensor: TensorRef) -> str:
    """The C++ name of its element type."""
    return CUDA_TYPES[tensor.dtype]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
