"""Routing traces: how often a run chose each expert of each layer, as JSON.

{"experts": 256, "layers": {"0": [count per expert], "1": [...]}}
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsv4c.errors import RecipeError

_FORM = 'a trace is JSON: {"experts": 256, "layers": {"0": [a count for each expert], ...}}'
# V4-Pro in full, with counts of twelve digits, is a tenth of it.
_MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class RoutingTrace:
    """`layers` has the counts of the layers that were traced; `where` names the file in messages."""

    where: str
    experts: int
    layers: Mapping[int, tuple[int, ...]]

    @property
    def digest(self) -> str:
        """SHA-256 of what it says, however the file is written."""
        layers = {str(layer): list(self.layers[layer]) for layer in sorted(self.layers)}
        text = json.dumps({"experts": self.experts, "layers": layers}, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def counts(self, layer: int, experts: int) -> tuple[int, ...]:
        """Those of a layer that has `experts` experts."""
        if experts != self.experts:
            raise RecipeError(
                f"{self.where} is a trace of {self.experts} experts, the model has {experts}",
                hint="trace the model that is built",
            )
        if layer not in self.layers:
            raise RecipeError(
                f"{self.where} has no counts of layer {layer}", hint="trace all layers, or choose another topology"
            )
        return self.layers[layer]


def read_trace(path: Path) -> RoutingTrace:
    """Reads and checks a trace. Raises RecipeError, as the recipe names it."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError(
            f"cannot read the routing trace {path}: {error.strerror}", hint="check `experts.trace` of the recipe"
        ) from None
    if len(data) > _MAX_BYTES:
        raise RecipeError(f"{path} has more than {_MAX_BYTES:,} bytes; a routing trace has fewer", hint=_FORM)
    try:
        value = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path} is no routing trace: {error}", hint=_FORM) from None
    return parse_trace(value, str(path))


def parse_trace(value: object, where: str) -> RoutingTrace:
    """A parsed trace file -> `RoutingTrace`."""
    if not isinstance(value, dict) or value.keys() != {"experts", "layers"}:
        raise RecipeError(f"{where} is no routing trace: it has other keys than `experts` and `layers`", hint=_FORM)
    experts, layers = value["experts"], value["layers"]
    if not _is_count(experts) or experts < 1:
        raise RecipeError(f"{where}: `experts` is {experts!r}", hint="give the number of experts of a layer")
    if not isinstance(layers, dict) or not layers:
        raise RecipeError(f"{where}: `layers` is empty or no object", hint=_FORM)
    return RoutingTrace(
        where, experts, {_layer(key, where): _counts(key, row, experts, where) for key, row in layers.items()}
    )


def _layer(key: str, where: str) -> int:
    # No second way to write a number, so no layer can be there twice.
    if not key.isascii() or not key.isdecimal() or len(key) > 6 or str(int(key)) != key:
        raise RecipeError(f"{where}: `layers` has a key {key!r}", hint='layers are numbers from "0"')
    return int(key)


def _counts(key: str, row: object, experts: int, where: str) -> tuple[int, ...]:
    if not isinstance(row, list) or len(row) != experts:
        found = f"{len(row)} counts" if isinstance(row, list) else "no list"
        raise RecipeError(f"{where}: layer {key} has {found}, `experts` is {experts}", hint=_FORM)
    for expert, count in enumerate(row):
        if not _is_count(count):
            raise RecipeError(
                f"{where}: the count of expert {expert} in layer {key} is {count!r}",
                hint="counts are whole numbers, 0 or more",
            )
    return tuple(row)


def _is_count(value: object) -> bool:
    # bool is an int in Python, and JSON has `true`.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is there twice")
    return dict(pairs)
