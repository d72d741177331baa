"""What the weights of an engine are: encoding and bytes of every class of tensor, error of what was quantised."""

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4c.checkpoint.formats import Encoding
from dsv4c.checkpoint.tensor_classes import TensorClass, tensor_class
from dsv4c.graph.annotations import Constant, Parameter
from dsv4c.plan.execution_plan import ExecutionPlan, Extent

CONSTANTS = "constants"


@dataclass(frozen=True)
class WeightTotal:
    """All weights of one class and encoding; `size_bytes` counts their scales too.

    Where the build quantised them, `made_of` is the checkpoint's encoding and `relative_error` the root mean square of
    the error over that of the values, to three digits; None before they are written.
    """

    kind: str
    encoding: str
    tensors: int
    size_bytes: int
    made_of: str | None = None
    relative_error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


_Key = tuple[TensorClass | None, Encoding, Encoding | None]  # class (None: constants), encoding, made of


def _key(name: str, what: Parameter) -> _Key:
    return tensor_class(name), what.stored_as, what.encoding if what.quantization else None


class ErrorMeter:
    """Sums the squared errors of what a build quantises; a `Measure` of `WeightReader`."""

    def __init__(self) -> None:
        self._error: defaultdict[_Key, float] = defaultdict(float)
        self._power: defaultdict[_Key, float] = defaultdict(float)

    def __call__(self, name: str, what: Parameter, values: Tensor, made: Tensor) -> None:
        key = _key(name, what)
        self._error[key] += _sum_of_squares(made - values)
        self._power[key] += _sum_of_squares(values)

    def relative_error(self, key: _Key) -> float | None:
        if key not in self._error:
            return None
        ratio = (self._error[key] / self._power[key]) ** 0.5 if self._power[key] else 0.0
        # Further digits may depend on the order of the sum.
        return float(f"{ratio:.3g}")


def _sum_of_squares(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def weight_totals(plan: ExecutionPlan, errors: ErrorMeter) -> list[WeightTotal]:
    """One row a class and encoding, in the order of `TensorClass`, constants last."""
    tensors: Counter[_Key] = Counter()
    sizes: Counter[_Key] = Counter()
    for extent in plan.weights.extents:
        key = _extent_key(extent)
        sizes[key] += extent.size_bytes
        tensors[key] += extent.tensors
    order = {kind: index for index, kind in enumerate([*TensorClass, None])}
    return [
        WeightTotal(
            kind=CONSTANTS if kind is None else kind.value,
            encoding=encoding.value,
            tensors=tensors[key],
            size_bytes=sizes[key],
            made_of=made_of and made_of.value,
            relative_error=errors.relative_error(key),
        )
        for key in sorted(sizes, key=lambda key: (order[key[0]], key[1].value))
        for kind, encoding, made_of in [key]
    ]


def _extent_key(extent: Extent) -> _Key:
    if isinstance(extent.what, Constant):
        return None, extent.what.stored_as, None
    return _key(extent.source, extent.what)
