"""A small engine written by hand from the records of dsv4c/engine/format.py, for tests that change one of them.

The model: x = embedding(token); compressed entries of x (state plane `entries`, with open groups in `groups`);
y = attention of x over a window ring and the entries; logits = head @ y. Every piece of state matters to the logits.

With `counting` there are also a router by token and one by score, which take x for the scores of WIDTH experts; their
choices are counted as those of layers 0 and 2 of 3, and nothing else comes of them.
"""

import hashlib
import json
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dsv4c.engine.format import (
    FORMAT_VERSION,
    MAGIC,
    NO_INDEX,
    SECTION_ALIGN,
    Arg,
    Bucket,
    ChunkHeader,
    EntryPoint,
    Header,
    Kernel,
    Launch,
    PlanHeader,
    Record,
    Section,
    SectionFlag,
    SectionType,
    State,
    Tensor,
)
from dsv4c.step_abi import ArgKind, BucketKind, Dim, DType, Input, LaunchFlag, Output, Space, StateKind

VOCAB, WIDTH, RATIO, BLOCK_TOKENS, WINDOW, ROLLBACK = 40, 8, 2, 4, 4, 3
RING_ROWS, GROUP_ROWS, CONTEXT = WINDOW + ROLLBACK, RATIO + ROLLBACK, 64
ROTARY, SCALE, EPS = 2, 0.5, 1e-6
DECODE_TOKENS, MIXED_TOKENS = (2,), (4, 8)
EOS = 7
CHUNK = 512
COUNTED_LAYERS, CHOICES = (0, 2), 2


def weight_arrays() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    random = np.random.default_rng(5)
    shapes = {
        "table": (VOCAB, WIDTH),
        "ape": (RATIO, WIDTH),
        "norm": (WIDTH,),
        "inv_freq": (ROTARY // 2,),
        "sink": (1,),
    }
    arrays = {name: random.normal(size=shape) for name, shape in {**shapes, "head": (VOCAB, WIDTH)}.items()}
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def expert_table() -> np.ndarray[Any, np.dtype[np.int64]]:
    """The experts of each token."""
    return np.random.default_rng(6).integers(0, WIDTH, (VOCAB, CHOICES))


def expert_bias() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(7).normal(size=WIDTH).astype(np.float32)


@dataclass
class Parts:
    """Everything in the engine before it is sealed."""

    header: dict[str, Any] = field(default_factory=dict)  # overrides
    plan_header: dict[str, Any] = field(default_factory=dict)
    entry_points: list[EntryPoint] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    args: list[Arg] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    eos_ids: list[int] = field(default_factory=lambda: [EOS])
    strings: bytearray = field(default_factory=lambda: bytearray(b"\0"))
    weights: bytearray = field(default_factory=bytearray)
    images: bytes = b""  # the KERNELS section; none if empty
    external_name: str = ""
    chunk_header: dict[str, Any] = field(default_factory=dict)
    weight_offsets: dict[str, int] = field(default_factory=dict)

    def string(self, text: str) -> int:
        at = self.strings.find(b"\0" + text.encode() + b"\0")
        if at >= 0:
            return at + 1
        self.strings += text.encode() + b"\0"
        return len(self.strings) - len(text) - 1

    def kernel(self, name: str) -> int:
        record = Kernel(self.string(name), NO_INDEX, 0, 0)
        if record not in self.kernels:
            self.kernels.append(record)
        return self.kernels.index(record)

    def edit(self, table: str, index: int, /, **changes: Any) -> None:
        records = getattr(self, table)
        records[index] = replace(records[index], **changes)

    def tensor_index(self, space: Space, index: int = 0) -> int:
        """The first tensor in a space."""
        return next(i for i, t in enumerate(self.tensors) if t.space == space and t.index == index)


Shape = list[int | tuple[Dim, int]]


def tensor(space: Space, dtype: DType, shape: Shape, offset: int = 0, index: int = 0) -> Tensor:
    """A dense tensor; a symbolic dimension is (code, capacity)."""
    dims = [Dim.FIXED if isinstance(d, int) else d[0] for d in shape]
    sizes = [d if isinstance(d, int) else d[1] for d in shape]
    strides = [-1 if 0 in sizes[i + 1 :] else int(np.prod(sizes[i + 1 :], dtype=int)) for i in range(len(sizes))]
    pad = 4 - len(shape)
    return Tensor(space, dtype, len(shape), index, offset, *dims, *[0] * pad, *sizes, *[1] * pad, *strides, *[0] * pad)


class _BucketWriter:
    def __init__(self, parts: Parts, tokens: int) -> None:
        self.parts = parts
        self.rows = (Dim.TOKENS, tokens)
        self.logits_rows = (Dim.LOGITS, tokens)
        self.arena_bytes = 0

    def arena(self, shape: Shape, dtype: DType = DType.F32) -> Tensor:
        sizes = [d if isinstance(d, int) else d[1] for d in shape]
        made = tensor(Space.ARENA, dtype, shape, self.arena_bytes)
        self.arena_bytes += -(-int(np.prod(sizes)) * 4 // 64) * 64
        return made

    def view(self, of: Tensor, shape: Shape) -> Tensor:
        return replace(tensor(Space.ARENA, DType.F32, shape), offset=of.offset)

    def weight(self, name: str) -> Tensor:
        return tensor(Space.WEIGHT, DType.F32, list(weight_arrays()[name].shape), self.parts.weight_offsets[name])

    def input(self, which: Input) -> Tensor:
        second: Shape = [(Dim.TABLE, 0)] if which == Input.BLOCK_TABLE else []
        if which == Input.MASK:
            second = [-(-VOCAB // 32)]
        first = self.rows if which < Input.BLOCK_TABLE else self.logits_rows
        dtype = {Input.TEMPERATURE: DType.F32, Input.TOP_P: DType.F32, Input.SEED: DType.I64}.get(which, DType.I32)
        if which == Input.BLOCK_TABLE:
            first = (Dim.SLOTS, 0)
        return tensor(Space.INPUT, dtype, [first, *second], index=which)

    def launch(self, kernel: str, args: list[Any], outputs: list[Tensor], flags: int = 0) -> None:
        parts = self.parts
        first = len(parts.args)
        for value in [*args, *outputs]:
            if value is None:
                parts.args.append(Arg(ArgKind.NONE, 0, 0))
            elif isinstance(value, Tensor):
                if value not in parts.tensors:
                    parts.tensors.append(value)
                parts.args.append(Arg(ArgKind.TENSOR, 0, parts.tensors.index(value)))
            elif isinstance(value, float):
                parts.args.append(Arg(ArgKind.FLOAT, 0, struct.unpack("<q", struct.pack("<d", value))[0]))
            else:
                parts.args.append(Arg(ArgKind.INT, 0, int(value)))
        layer = 0 if kernel in ("attention", "compress", "commit_ring") else NO_INDEX
        count = len(parts.args) - first
        name = parts.string(f"{kernel}_node")
        parts.launches.append(
            Launch(parts.kernel(kernel), name, layer, flags, first, count, len(outputs), 0, 100, 200, *[0] * 8)
        )


def _add_counting(b: _BucketWriter, x: Tensor) -> None:
    """The routers, and the counts of their choices in the last state planes."""
    offsets = b.parts.weight_offsets
    table = tensor(Space.WEIGHT, DType.I64, [VOCAB, CHOICES], offsets["expert_table"])
    bias = tensor(Space.WEIGHT, DType.F32, [WIDTH], offsets["expert_bias"])
    token_ids = b.input(Input.TOKEN_IDS)
    first = len(b.parts.states) - len(COUNTED_LAYERS)
    for place, (kernel, *args) in enumerate((("route_hash", x, table, token_ids), ("route_topk", x, bias, CHOICES))):
        ids, weights = b.arena([b.rows, CHOICES], DType.I32), b.arena([b.rows, CHOICES])
        b.launch(kernel, [*args, 1.0], [ids, weights])
        b.launch("count_routing", [ids, tensor(Space.STATE, DType.I64, [1, WIDTH], index=first + place)], [])


def _add_bucket(parts: Parts, kind: BucketKind, tokens: int, counting: bool) -> None:
    b = _BucketWriter(parts, tokens)
    first = len(parts.launches)
    slots, positions, table = b.input(Input.SLOTS), b.input(Input.POSITIONS), b.input(Input.BLOCK_TABLE)
    ring = tensor(Space.STATE, DType.F32, [(Dim.SLOTS, 0), RING_ROWS, WIDTH], index=0)
    groups = tensor(Space.STATE, DType.F32, [(Dim.SLOTS, 0), GROUP_ROWS, 2, WIDTH], index=1)
    entries = tensor(Space.STATE, DType.F32, [(Dim.BLOCKS, 0), BLOCK_TOKENS // RATIO, WIDTH], index=2)
    x = b.arena([b.rows, WIDTH])
    heads = b.view(x, [b.rows, 1, WIDTH])
    y = b.arena([b.rows, 1, WIDTH])
    chosen = b.arena([b.logits_rows, 1, WIDTH])
    logits = tensor(Space.OUTPUT, DType.F32, [b.logits_rows, VOCAB], index=Output.LOGITS)
    sampled = tensor(Space.OUTPUT, DType.I32, [b.logits_rows], index=Output.SAMPLED)

    b.launch("embedding", [b.input(Input.TOKEN_IDS), b.weight("table"), DType.F32], [x])
    if counting:
        _add_counting(b, x)
    compress: list[Any] = [x, x, b.weight("ape"), b.weight("norm"), b.weight("inv_freq"), slots, positions, table]
    b.launch("compress", [*compress, groups, entries, None, RATIO, False, EPS, 0, DType.F32], [])
    attention = [heads, x, ring, None, entries, None, None, b.weight("sink"), slots, positions, table]
    b.launch("attention", [*attention, WINDOW, RATIO, ROTARY, SCALE], [y])
    b.launch("commit_ring", [x, ring, None, slots, positions, ROTARY], [])
    b.launch("gather_rows", [y, b.input(Input.LOGITS_ROWS)], [chosen], LaunchFlag.HEAD)
    head = [b.view(chosen, [b.logits_rows, WIDTH]), b.weight("head"), None, 0, 0, DType.F32]
    b.launch("linear", head, [logits], LaunchFlag.HEAD)
    sampling = [b.input(which) for which in (Input.TEMPERATURE, Input.TOP_K, Input.TOP_P, Input.SEED, Input.MASK)]
    b.launch(
        "sample",
        [logits, b.input(Input.LOGITS_ROWS), positions, *sampling],
        [sampled],
        LaunchFlag.HEAD | LaunchFlag.SAMPLE,
    )
    parts.buckets.append(Bucket(kind, tokens, first, len(parts.launches) - first, b.arena_bytes, 0, 0))


def hand_parts(counting: bool = False) -> Parts:
    parts = Parts()
    arrays: dict[str, np.ndarray[Any, Any]] = {**weight_arrays()}
    if counting:
        arrays |= {"expert_table": expert_table(), "expert_bias": expert_bias()}
        parts.plan_header["layer_count"] = max(COUNTED_LAYERS) + 1
    for name, array in arrays.items():
        parts.weights += bytes(-len(parts.weights) % 64)
        parts.weight_offsets[name] = len(parts.weights)
        parts.weights += array.tobytes()
    for name, kind, rows, ratio, row_width in (
        ("ring", StateKind.SLOT, RING_ROWS, 1, WIDTH),
        ("groups", StateKind.SLOT, GROUP_ROWS, 1, 2 * WIDTH),
        ("entries", StateKind.BLOCK, BLOCK_TOKENS // RATIO, RATIO, WIDTH),
    ):
        parts.states.append(State(parts.string(name), kind, DType.F32, 0, rows, ratio, row_width * 4))
    for layer in COUNTED_LAYERS if counting else ():
        parts.states.append(
            State(parts.string(f"counts_{layer}"), StateKind.ROUTING_COUNTS, DType.I64, layer, WIDTH, 1, 8)
        )
    for tokens in DECODE_TOKENS:
        _add_bucket(parts, BucketKind.DECODE, tokens, counting)
    for tokens in MIXED_TOKENS:
        _add_bucket(parts, BucketKind.MIXED, tokens, counting)
    parts.entry_points.append(EntryPoint(parts.string("main"), 0, len(parts.buckets), 0))
    return parts


def plan_section(parts: Parts) -> bytes:
    tables: dict[str, tuple[bytes, int]] = {}
    for name, header_name in (
        ("entry_points", "entry_point_count"),
        ("buckets", "bucket_count"),
        ("launches", "launch_count"),
        ("args", "arg_count"),
        ("tensors", "tensor_count"),
        ("states", "state_count"),
        ("kernels", "kernel_count"),
    ):
        records: list[Record] = getattr(parts, name)
        tables[f"{name} {header_name}"] = b"".join(record.pack() for record in records), len(records)
    tables["eos_ids eos_count"] = struct.pack(f"<{len(parts.eos_ids)}I", *parts.eos_ids), len(parts.eos_ids)
    tables["strings strings_bytes"] = bytes(parts.strings), len(parts.strings)
    fields: dict[str, int] = {}
    body, offset = b"", PlanHeader.LAYOUT.size
    for names, (data, count) in tables.items():
        table_name, count_name = names.split()
        fields[table_name], fields[count_name] = offset, count
        body += data
        offset += len(data)
    header = PlanHeader(
        plan_version=1,
        world_size=1,
        rank=0,
        sm_count=0,
        vocab_size=VOCAB,
        max_context=CONTEXT,
        block_tokens=BLOCK_TOKENS,
        rollback_rows=ROLLBACK,
        hidden_size=WIDTH,
        layer_count=1,
        bos_token_id=1,
        weight_bytes=len(parts.weights),
        **fields,
    )
    return replace(header, **parts.plan_header).pack() + body


def chunks_section(parts: Parts) -> bytes:
    weights = bytes(parts.weights)
    digests = [hashlib.sha256(weights[i : i + CHUNK]).digest() for i in range(0, len(weights), CHUNK)]
    header = ChunkHeader(1, 0, CHUNK, len(digests), len(weights), parts.external_name.encode(), b"")
    return replace(header, **parts.chunk_header).pack() + b"".join(digests)


def table_digest(header: Header, table: bytes) -> bytes:
    return hashlib.sha256(header.pack()[: -len(header.table_digest)] + table).digest()[:16]


def with_sections(data: bytes, **changes: dict[str, Any]) -> bytes:
    """An engine with fields of its section table changed (by section name), and a table digest that fits."""
    header = Header.unpack(data)
    table = b""
    for i in range(header.section_count):
        entry = Section.unpack(data, Header.LAYOUT.size + i * Section.LAYOUT.size)
        table += replace(entry, **changes.get(SectionType(entry.type).name, {})).pack()
    sealed = replace(header, table_digest=table_digest(header, table)).pack() + table
    return sealed + data[len(sealed) :]


def seal(parts: Parts, omit: tuple[SectionType, ...] = ()) -> bytes:
    sections = {
        SectionType.MANIFEST: json.dumps({"model": "hand-made"}).encode(),
        SectionType.PLAN: plan_section(parts),
        **({SectionType.KERNELS: parts.images} if parts.images else {}),
        SectionType.TOKENIZER: json.dumps({"tokenizer.json": "{}"}).encode(),
        SectionType.GOLDENS: json.dumps({"prompts": []}).encode(),
        SectionType.CHUNKS: chunks_section(parts),
        SectionType.WEIGHTS: bytes(parts.weights),
    }
    kept = {kind: data for kind, data in sections.items() if kind not in omit}
    table, body = b"", b""
    start = SECTION_ALIGN
    for kind, data in kept.items():
        external = kind == SectionType.WEIGHTS and bool(parts.external_name)
        digest = hashlib.sha256(sections[SectionType.CHUNKS] if kind == SectionType.WEIGHTS else data).digest()
        offset = 0 if external else start + len(body)
        flags = SectionFlag.EXTERNAL if external else 0
        table += Section(kind, flags, offset, len(data), 0, digest).pack()
        if not external:
            body += data + bytes(-len(data) % SECTION_ALIGN)
    header = Header(MAGIC, FORMAT_VERSION, len(kept), start + len(body), b"cpu", 1, 0, bytes(16))
    header = replace(header, **parts.header)
    header = replace(header, table_digest=table_digest(header, table))
    head = header.pack() + table
    return head + bytes(start - len(head)) + body


def write_engine(path: Path, parts: Parts | None = None) -> Path:
    path.write_bytes(seal(parts or hand_parts()))
    return path
