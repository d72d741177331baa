"""Goldens: short runs recorded at build time that say, launch by launch, what an engine must compute.

A launch's output is recorded as a fingerprint: its root mean square and a few of its values at fixed places. That is
enough to name the first launch that differs, and small beside an engine.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SAMPLES = 64


@dataclass(frozen=True)
class Fingerprint:
    """Of one output: number of values, root mean square, and up to SAMPLES values evenly spread."""

    count: int
    rms: float
    samples: tuple[float, ...]


@dataclass(frozen=True)
class GoldenLaunch:
    """A launch of a golden step with the fingerprints of its outputs."""

    kernel: str
    name: str
    layer: int | None
    outputs: tuple[Fingerprint, ...]


@dataclass(frozen=True)
class GoldenStep:
    """One step of slot 0: the tokens from `position` on, and every launch in order."""

    token_ids: tuple[int, ...]
    position: int
    launches: tuple[GoldenLaunch, ...]


@dataclass(frozen=True)
class Goldens:
    """Steps to run in order on one fresh slot.

    An output agrees where the error at `quantile` of its samples (1: the largest), relative to the size of the output,
    is at most `tolerance`.
    """

    tolerance: float
    quantile: float
    steps: tuple[GoldenStep, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Goldens":
        """The inverse of `to_dict` after a round trip through JSON."""
        return Goldens(data["tolerance"], data["quantile"], tuple(_step(step) for step in data["steps"]))


def _step(data: dict[str, Any]) -> GoldenStep:
    launches = tuple(
        GoldenLaunch(
            launch["kernel"],
            launch["name"],
            launch["layer"],
            tuple(Fingerprint(o["count"], o["rms"], tuple(o["samples"])) for o in launch["outputs"]),
        )
        for launch in data["launches"]
    )
    return GoldenStep(tuple(data["token_ids"]), data["position"], launches)


def fingerprint(values: npt.NDArray[Any]) -> Fingerprint:
    """Of an array of numbers (float32 or integers)."""
    flat = np.asarray(values, np.float64).reshape(-1)
    places = np.unique(np.linspace(0, flat.size - 1, min(SAMPLES, flat.size)).round().astype(np.int64))
    # float32 is what the kernels computed; more digits would only be noise.
    samples = tuple(float(np.float32(value)) for value in flat[places])
    return Fingerprint(flat.size, float(np.float32(np.sqrt(np.mean(flat * flat)))), samples)


def difference(expected: Fingerprint, found: Fingerprint, quantile: float) -> float:
    """Error at `quantile` of the samples, relative to the size of the expected output; inf where NaN appears."""
    if expected.count != found.count:
        return float("inf")
    error = np.abs(np.subtract(expected.samples, found.samples))
    if not np.all(np.isfinite(error)):
        return float("inf")
    return float(np.quantile(error, quantile, method="higher")) / max(expected.rms, 1e-30)


def first_difference(
    goldens: Goldens, expected: Sequence[GoldenLaunch], found: Sequence[GoldenLaunch]
) -> tuple[int, float] | None:
    """Index of the first launch whose output is off by more than allowed, and by how much; None where all agree."""
    for index, (a, b) in enumerate(zip(expected, found, strict=False)):
        if (a.kernel, a.name, len(a.outputs)) != (b.kernel, b.name, len(b.outputs)):
            return index, float("inf")
        errors = [difference(x, y, goldens.quantile) for x, y in zip(a.outputs, b.outputs, strict=True)]
        if max(errors, default=0.0) > goldens.tolerance:
            return index, max(errors)
    return None if len(expected) == len(found) else (min(len(expected), len(found)), float("inf"))
