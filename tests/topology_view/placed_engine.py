"""Engine files of which only the manifest's experts and their topologies are real."""

import struct
from pathlib import Path
from typing import Any

from dsv4c.engine.writer import EngineParts, write_engine
from dsv4c.graph.topology import ExpertShapes, TopologyKind, place

SM_COUNTS = (132, 114)
SHAPES = ExpertShapes(experts=64, hidden=1024, inner=512)
EXPERT_BYTES = 835_584  # FP4
LAYERS = (0, 1, 2, 5)
BEFORE_TABLES = 4096


def trace_counts(layer: int) -> list[int]:
    return [(expert * 37 + layer * 11) % 101 for expert in range(SHAPES.experts)]


def manifest_of(kind: TopologyKind, group_sms: int = 12) -> tuple[dict[str, Any], bytes]:
    """A manifest, and the WEIGHTS with its tables."""
    weights = bytearray(BEFORE_TABLES)
    layers: list[dict[str, Any]] = []
    for layer in LAYERS:
        table = None
        if kind != "striped":
            tables = [place(SHAPES, sms, kind, group_sms, trace_counts(layer)).table() for sms in SM_COUNTS]
            row = max(map(len, tables))
            table = {"offset": len(weights), "row": row}
            for values in tables:
                weights += struct.pack(f"<{row}i", *values, *[0] * (row - len(values)))
        layers.append({"layer": layer, "choice": "hash" if layer < 2 else "score", "table": table})
    facts = {
        "layout": "packed",
        "format": "fp4",
        "experts": SHAPES.experts,
        "per_token": 4,
        "hidden": SHAPES.hidden,
        "inner": SHAPES.inner,
        "expert_bytes": EXPERT_BYTES,
        "topology": kind,
        "group_sms": group_sms,
        "trace": "ab" * 32 if kind == "traced" else None,
        "sm_counts": list(SM_COUNTS),
        "layers": layers,
        "buckets": [
            {"tokens": 8, "kernel": "experts_stream", "place_pairs": 8, "halves": True},
            {"tokens": 64, "kernel": "experts_stream", "place_pairs": 8, "halves": False},
            {"tokens": 1024, "kernel": "experts_grouped", "place_pairs": 128, "halves": False},
        ],
    }
    code = [
        {
            "operator": "placed_experts",
            "entry": "experts_stream",
            "block": 672,
            "registers": 90,
            "static_shared_bytes": 0,
            "dynamic_shared_bytes": shared,
        }
        for shared in (129_536, 120_000)
    ]
    return {"target": "h100", "arch": "sm_90a", "machine_code": code, "experts": facts}, bytes(weights)


def write_placed_engine(path: Path, manifest: dict[str, Any], weights: bytes) -> Path:
    parts = EngineParts(
        arch=manifest["arch"],
        manifest=manifest,
        plan=b"p" * 5000,
        tokenizer_files={},
        goldens=None,
        weight_bytes=len(weights),
    )
    write_engine(path, parts, iter([weights]))
    return path
