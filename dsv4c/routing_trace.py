"""Routing traces: how often a run chose each expert of each layer, as JSON.

{"experts": 256, "layers": {"0": [count per expert], "1": [...]}}

A trace is of one model: it has every layer of it, those routed by token as well as those routed by score, and no other
(the draft module is not compiled). Counts are compared within a layer only, so layers may have counted different runs,
but each must have counted something.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsv4c.errors import RecipeError

_FORM = 'a trace is JSON: {"experts": 256, "layers": {"0": [a count for each expert], ...}}'
# V4-Pro in full, with counts of twelve digits, is a tenth of it.
_MAX_BYTES = 4 << 20
# Counters have 64 bits.
_MAX_COUNT = (1 << 63) - 1
_SHOWN = 40  # characters of a value in a message


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

    def require_model(self, layers: int, experts: int) -> None:
        """Raises RecipeError where this is no trace of a model of `layers` layers with `experts` experts each."""
        self._require_experts(experts)
        for layer in range(layers):
            self._require_layer(layer)
        if others := sorted(layer for layer in self.layers if layer >= layers):
            raise RecipeError(
                f"{self.where} has counts of layer {others[0]}; the model has layers 0 to {layers - 1}",
                hint="trace the model that is built; layers of a draft module are not compiled",
            )

    def counts(self, layer: int, experts: int) -> tuple[int, ...]:
        """Those of a layer that has `experts` experts."""
        self._require_experts(experts)
        self._require_layer(layer)
        return self.layers[layer]

    def _require_experts(self, experts: int) -> None:
        if experts != self.experts:
            raise RecipeError(
                f"{self.where} is a trace of {self.experts} experts, the model has {experts}",
                hint="trace the model that is built",
            )

    def _require_layer(self, layer: int) -> None:
        if layer not in self.layers:
            raise RecipeError(
                f"{self.where} has no counts of layer {layer}",
                hint="trace all layers, also those routed by token, or choose another topology",
            )


def format_trace(experts: int, layers: Mapping[int, Sequence[int]]) -> str:
    """The text of a trace file, a line a layer; `read_trace` takes it back."""
    rows = ",\n".join(f'"{layer}": {json.dumps(list(layers[layer]))}' for layer in sorted(layers))
    return f'{{"experts": {experts}, "layers": {{\n{rows}\n}}}}\n'


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
        raise RecipeError(f"{where}: `experts` is {_shown(experts)}", hint="give the number of experts of a layer")
    if not isinstance(layers, dict) or not layers:
        raise RecipeError(f"{where}: `layers` is empty or no object", hint=_FORM)
    return RoutingTrace(
        where, experts, {_layer(key, where): _counts(key, row, experts, where) for key, row in layers.items()}
    )


def _layer(key: str, where: str) -> int:
    # No second way to write a number, so no layer can be there twice.
    if not key.isascii() or not key.isdecimal() or len(key) > 6 or str(int(key)) != key:
        raise RecipeError(f"{where}: `layers` has a key {_shown(key)}", hint='layers are numbers from "0"')
    return int(key)


def _counts(key: str, row: object, experts: int, where: str) -> tuple[int, ...]:
    if not isinstance(row, list) or len(row) != experts:
        found = f"{len(row)} counts" if isinstance(row, list) else "no list"
        raise RecipeError(f"{where}: layer {key} has {found}, `experts` is {experts}", hint=_FORM)
    for expert, count in enumerate(row):
        if not _is_count(count):
            raise RecipeError(
                f"{where}: the count of expert {expert} in layer {key} is {_shown(count)}",
                hint="counts are whole numbers from 0 to 2^63 - 1",
            )
    if not any(row):
        raise RecipeError(
            f"{where}: layer {key} has chosen no expert", hint="trace a run with tokens, through all layers"
        )
    return tuple(row)


def _is_count(value: object) -> bool:
    # bool is an int in Python, and JSON has `true`.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT


def _shown(value: object) -> str:
    """A value of the file in a message: it may be as long as the file."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{_shown(name)} is there twice")
        found[name] = value
    return found
