"""A stored matrix as kernels are specialised for it: the macros of `cuda/weight.cuh`, and which kernels can read it."""

from dataclasses import dataclass

from dsv4c.errors import PlanError
from dsv4c.kernels.select.selection import cuda_type
from dsv4c.plan.execution_plan import TensorRef
from dsv4c.step_abi import DType

# A lane of a tensor-core kernel reads 16 bytes of a row, the four lanes of a row 64: a chunk.
LANE_BYTES = 16
CHUNK_BYTES = 64

_INTEGERS = (DType.I8, DType.U8)


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [O, I], or one of each expert [E, O, I]; `columns` is I, in FP4 twice the bytes of a row."""

    weight: TensorRef
    scales: TensorRef | None
    block_rows: int
    block_cols: int

    @property
    def rows(self) -> int:
        return self.weight.sizes[-2]

    @property
    def per_byte(self) -> int:
        """Columns in an element of the tensor."""
        return 2 if self.weight.dtype is DType.F4E2M1X2 else 1

    @property
    def columns(self) -> int:
        return self.weight.sizes[-1] * self.per_byte

    @property
    def lane_columns(self) -> int:
        return LANE_BYTES // self.weight.dtype.size_bytes * self.per_byte

    @property
    def chunk_columns(self) -> int:
        return 4 * self.lane_columns

    def macros(self) -> dict[str, int | float | str]:
        macros: dict[str, int | float | str] = {
            "W_TYPE": cuda_type(self.weight),
            "W_STRIDE": self.weight.strides[-2],
            "COLUMNS": self.columns,
            "SCALED": int(self.scales is not None),
        }
        if self.scales is not None:
            macros |= {
                "S_TYPE": cuda_type(self.scales),
                "S_STRIDE": self.scales.strides[-2],
                "BLOCK_ROWS": self.block_rows,
                "BLOCK_COLS": self.block_cols,
            }
        return macros

    def expert_macros(self) -> dict[str, int | float | str]:
        """From one expert to the next."""
        macros: dict[str, int | float | str] = {"EXPERT_STRIDE": self.weight.strides[0]}
        if self.scales is not None:
            macros["S_EXPERT_STRIDE"] = self.scales.strides[0]
        return macros

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        return (self.weight,) if self.scales is None else (self.weight, self.scales)

    def rows_aligned(self) -> bool:
        """Whether every row, of every expert, begins and ends at a multiple of 16 bytes."""
        size = self.weight.dtype.size_bytes
        places = (self.weight.offset, *(stride * size for stride in self.weight.strides[:-1]), self.columns_bytes)
        return all(place % LANE_BYTES == 0 for place in places)

    @property
    def columns_bytes(self) -> int:
        return self.weight.sizes[-1] * self.weight.dtype.size_bytes

    def fits_tensor_cores(self) -> bool:
        """Whether the warps of `weight.cuh` can read it: each chunk of a row under one scale, FP4 under one a lane."""
        if not self.rows_aligned():
            return False
        if self.scales is None:
            return self.weight.dtype is DType.BF16
        if self.weight.dtype is DType.F8E4M3:
            return self.block_cols % CHUNK_BYTES == 0 or self.block_cols >= self.columns
        return self.weight.dtype is DType.F4E2M1X2 and self.scales.dtype is DType.F8E8M0 and self.block_rows == 1


def stored_matrix(
    launch: str, weight: TensorRef, scales: TensorRef | None, block_rows: int, block_cols: int
) -> StoredMatrix:
    """Raises PlanError for the integer formats, which have no kernels here."""
    if weight.dtype in _INTEGERS or (scales is not None and scales.dtype is DType.F16):
        raise PlanError(
            f"%{launch} has INT8 or INT4 weights; the CUDA kernels of this target read bf16, FP8 and FP4",
            hint='set `experts` and `dense` in `[weights]` of the recipe to "stored", "fp8" or, for experts, "fp4"',
        )
    if weight.dtype is DType.F4E2M1X2:
        block_rows, block_cols = 1, 32  # the format's own
    return StoredMatrix(weight, scales, block_rows, block_cols)
