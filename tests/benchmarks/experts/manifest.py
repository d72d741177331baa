"""What `compile` hands to `run`: every variant's calls as data. Standard library only."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FILE = "experts.json"
# The kind of variants that stream the weights where the selector would not.
STREAMED = "stream"


@dataclass(frozen=True)
class Shape:
    """The routed experts of a layer and their router."""

    name: str
    hidden: int
    inner: int
    experts: int
    choices: int
    scale: float  # what the weights of a row add up to
    limit: float


@dataclass(frozen=True)
class Operand:
    """A tensor of the operator. `values` where the compiler knows them (the topology)."""

    name: str
    dtype: str
    sizes: tuple[int, ...]
    values: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Argument:
    """A pointer: `offset` bytes into an operand, or into the scratch memory where `operand` is none."""

    name: str
    operand: str | None
    dtype: str
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class Call:
    cubin: str  # file beside the manifest
    symbol: str
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    programmatic: bool
    arguments: tuple[Argument, ...]  # then the step's header
    constants: dict[str, int | float | str]
    registers: int
    spill_bytes: int


@dataclass(frozen=True)
class Variant:
    """The calls of one operator in one bucket."""

    name: str
    shape: str
    weights: str  # fp4, fp8
    topology: str
    routing: str  # topk, hash
    bucket: int
    kernel: str
    # product; stream; the label of a change, of the second behind `stream-`; floor (without arithmetic, also
    # stream-floor) and several, which are only timed
    kind: str
    record_bytes: int  # from one expert to the next
    groups: int
    sm_count: int
    scratch_bytes: int
    operands: tuple[Operand, ...]
    calls: tuple[Call, ...]  # one that makes the lists, then the experts'

    @property
    def has_results(self) -> bool:
        """Whether they are compared with the reference."""
        return self.kind not in ("floor", f"{STREAMED}-floor", "several")

    @property
    def of_few_buckets(self) -> bool:
        """Whether its series is compiled for some buckets only: no need to measure steps of much fewer rows in it."""
        return self.routing == "hash" or self.kind.partition("-")[0] == STREAMED

    @property
    def experts_call(self) -> Call:
        return self.calls[-1]

    @property
    def tile(self) -> int:
        """The most pairs of a place."""
        return int(self.experts_call.constants["TILE"])

    def operand(self, name: str) -> Operand | None:
        return next((operand for operand in self.operands if operand.name == name), None)


@dataclass(frozen=True)
class Manifest:
    commit: str
    shapes: tuple[Shape, ...]
    variants: tuple[Variant, ...]
    # Other kernels of the measurement, by name.
    tools: dict[str, Call] = field(default_factory=dict)

    def shape(self, name: str) -> Shape:
        return next(shape for shape in self.shapes if shape.name == name)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / FILE).write_text(json.dumps(asdict(manifest), separators=(",", ":")))


def read_manifest(folder: Path) -> Manifest:
    data = json.loads((folder / FILE).read_text())
    return Manifest(
        data["commit"],
        tuple(Shape(**shape) for shape in data["shapes"]),
        tuple(_variant(variant) for variant in data["variants"]),
        {name: _call(call) for name, call in data["tools"].items()},
    )


def _variant(data: dict[str, Any]) -> Variant:
    operands = tuple(_operand(operand) for operand in data.pop("operands"))
    calls = tuple(_call(call) for call in data.pop("calls"))
    return Variant(**data, operands=operands, calls=calls)


def _operand(data: dict[str, Any]) -> Operand:
    values = data.pop("values")
    return Operand(**{**data, "sizes": tuple(data["sizes"])}, values=None if values is None else tuple(values))


def _call(data: dict[str, Any]) -> Call:
    arguments = tuple(Argument(**argument) for argument in data.pop("arguments"))
    return Call(**{**data, "grid": tuple(data["grid"])}, arguments=arguments)
