"""The topology of a layer as an engine stores it."""

import struct
from dataclasses import dataclass
from typing import Any

from dsv4c.engine.reader import EngineReader
from dsv4c.errors import EngineFormatError, InputError
from dsv4c.graph.topology import ExpertShapes, Topology, group_count, place, read_table, table_size

STREAM_KERNEL = "experts_stream"


@dataclass(frozen=True)
class StoredTopology:
    """`facts` is what the manifest says of the experts, `choice` how this layer is routed."""

    facts: dict[str, Any]
    layer: int
    choice: str
    topology: Topology

    @property
    def unit_bytes(self) -> tuple[int, int]:
        """Weights of a unit of the first and of the second phase: the first matrices are two thirds of an expert."""
        third, shapes = self.facts["expert_bytes"] // 3, self.topology.shapes
        return 2 * third // shapes.up_panels, third // shapes.down_panels

    def to_dict(self) -> dict[str, Any]:
        topology = self.topology
        return {
            "layer": self.layer,
            "choice": self.choice,
            "experts": {name: self.facts[name] for name in ("experts", "per_token", "hidden", "inner", "format")},
            "expert_bytes": self.facts["expert_bytes"],
            "topology": topology.name,
            "trace": self.facts["trace"],
            "sm_count": topology.sm_count,
            "groups": [
                {
                    "sms": list(range(*topology.first_sm[group : group + 2])),
                    "experts": list(topology.experts_of(group)),
                }
                for group in range(topology.groups)
            ],
        }

    def sharing(self, tokens: int) -> tuple[int, bool]:
        """(pairs of a place, whether SMs do the places in two halves) in a step of so many rows.

        Raises InputError where the work is not shared out beforehand.
        """
        buckets = [bucket for bucket in self.facts["buckets"] if bucket["kernel"] == STREAM_KERNEL]
        for bucket in buckets:
            if tokens <= bucket["tokens"]:
                return bucket["place_pairs"], bucket["halves"]
        most = max((bucket["tokens"] for bucket in buckets), default=0)
        largest = max(bucket["tokens"] for bucket in self.facts["buckets"])
        if tokens > largest:
            raise InputError(
                f"no step of this engine has {tokens:,} tokens: its largest bucket has {largest:,} rows",
                hint="draw a smaller step with --tokens or --hit",
            )
        raise InputError(
            f"in a step of {tokens:,} tokens the SMs of a group take their units as they become free; steps of up to "
            f"{most:,} are shared out beforehand",
            hint="draw a smaller step with --tokens or --hit",
        )


def stored_topology(reader: EngineReader, layer: int | None, sm_count: int | None) -> StoredTopology:
    """Of `layer` (None: the first that has routed experts) on a card of `sm_count` SMs (None: the first product)."""
    manifest = reader.manifest
    facts = manifest.get("experts")
    if not facts:
        raise _without(reader, manifest)
    rows = {row["layer"]: row for row in facts["layers"]}
    chosen = next(iter(rows)) if layer is None else layer
    if chosen not in rows:
        raise InputError(
            f"{reader.path} has no topology of layer {chosen}", hint=f"it has those of layers {_ranges(list(rows))}"
        )
    counts = facts["sm_counts"]
    sms = counts[0] if sm_count is None else sm_count
    if sms not in counts:
        raise InputError(
            f"{reader.path} is not for a card of {sms} SMs", hint=f"choose one of: {', '.join(map(str, counts))}"
        )
    shapes = ExpertShapes(facts["experts"], facts["hidden"], facts["inner"])
    kind, table = facts["topology"], rows[chosen]["table"]
    if table is None:
        found = place(shapes, sms, "striped", facts["group_sms"])
    else:
        groups = group_count(kind, shapes.experts, sms, facts["group_sms"])
        size = table_size(groups, shapes.experts, sms)
        start = table["offset"] + 4 * table["row"] * counts.index(sms)
        values = struct.unpack(f"<{size}i", reader.weight_bytes(start, 4 * size))
        try:
            found = read_table(shapes, kind, sms, groups, values)
        except ValueError as error:
            raise EngineFormatError(
                f"{reader.path}: the topology of layer {chosen} is damaged: {error}",
                hint="`dsv4c verify` says what else is; build the engine again",
            ) from None
    return StoredTopology(facts, chosen, rows[chosen]["choice"], found)


def _without(reader: EngineReader, manifest: dict[str, Any]) -> InputError:
    if not manifest["machine_code"]:
        return InputError(
            f"{reader.path} is an engine for {manifest['target']}, which has no SMs to place experts on",
            hint="topologies are of engines built with `dsv4c build --target h100`",
        )
    return InputError(
        f"the experts of {reader.path} lie as in the checkpoint; several launches compute them, without a topology",
        hint="packed experts take reference numerics, FP4 or FP8 weights, hidden and expert widths that 128 divides, "
        'and `layout = "packed"` in the recipe',
    )


def _ranges(layers: list[int]) -> str:
    """`0 to 4, 6`."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
