"""How a state plane is stored, as the kernels' macros say it (cuda/state_rows.cuh)."""

from dataclasses import dataclass
from math import prod

from dsv4c.errors import PlanError
from dsv4c.plan.execution_plan import TensorRef
from dsv4c.step_abi import DType

_FORMATS = {
    (DType.F32, False): "STATE_F32",
    (DType.BF16, False): "STATE_BF16",
    (DType.U8, True): "STATE_KV",
    (DType.F4E2M1X2, True): "STATE_E2M1",
    (DType.F8E4M3, True): "STATE_E4M3",
}


@dataclass(frozen=True)
class StatePlaneRows:
    """The rows of a plane [S or B, rows, row] and of its exponents, dense."""

    rows: TensorRef
    exponents: TensorRef  # where there are none, the rows stand in: no kernel reads them
    format: str
    row_bytes: int
    exponent_bytes: int

    @property
    def per_unit(self) -> int:
        """Rows of a slot or block."""
        return self.rows.sizes[1]

    def aligned(self, row_bytes: int, exponent_bytes: int) -> bool:
        """Whether every row and its exponents start at a multiple of these."""
        return not (
            self.rows.offset % row_bytes
            or self.row_bytes % row_bytes
            or (self.exponent_bytes and self.exponents.offset % exponent_bytes)
            or self.exponent_bytes % exponent_bytes
        )


def state_plane(plane: TensorRef, exponents: TensorRef | None) -> StatePlaneRows:
    """Raises PlanError where no kernel knows the format."""
    name = _FORMATS.get((plane.dtype, exponents is not None))
    if name is None:
        scaled = "with" if exponents else "without"
        raise PlanError(
            f"the CUDA kernels read no state planes of {plane.dtype.name} {scaled} scales",
            hint="choose another `kv` in the recipe",
        )
    for tensor in (plane, exponents or plane):
        dense = tuple(prod(tensor.sizes[axis + 1 :]) for axis in range(3))
        assert tensor.strides == dense, tensor
    return StatePlaneRows(
        plane,
        exponents or plane,
        name,
        plane.sizes[2] * plane.dtype.size_bytes,
        exponents.sizes[2] if exponents else 0,
    )
