"""The engine file, byte by byte: the one place that says how it is laid out (described in artifacts/README.md).

Little endian throughout. The C++ runtime mirrors every record in `runtime/src/engine_format.h` with a static_assert on
its size; `tests/engine/test_format.py` compares the two. This module loads without torch.

    header          64 bytes
    section table   64 bytes a section, right after the header
    sections        each on a 4,096-byte boundary, zero padding between them

Opening an engine checks the header, the table digest and the digest of every section but WEIGHTS, whose chunks have
digests of their own in CHUNKS. The numbers that records hold for dtypes, dimensions, inputs and kinds are in
`dsv4c/step_abi.py`.
"""

import enum
import struct
from dataclasses import dataclass, fields
from typing import ClassVar, Self

MAGIC = b"DSV4CENG"
FORMAT_VERSION = 1
READABLE_VERSIONS = (1,)
SECTION_ALIGN = 4096
# Weight chunks are read and checked one by one; 4 MiB keeps the table small (2.5 MB for 320 GB) and a read short.
CHUNK_BYTES = 4 << 20
NO_INDEX = 0xFFFFFFFF


class SectionType(enum.IntEnum):
    MANIFEST = 1  # JSON, for people and tools; the runtime never parses it
    PLAN = 2  # the records below
    KERNELS = 3  # machine code, one image after the other; absent on the cpu target
    TOKENIZER = 4  # JSON object: file name -> text
    GOLDENS = 5  # JSON; outside the reproducible digest
    CHUNKS = 6  # ChunkHeader, then one sha256 per weight chunk
    WEIGHTS = 7  # raw; in this file or in an external one


class SectionFlag(enum.IntFlag):
    EXTERNAL = 1  # bytes are in the file that CHUNKS names, beside the engine; offset is 0


@dataclass(frozen=True)
class Record:
    """A fixed-size record; `LAYOUT` is its struct format, fields in the order of the dataclass."""

    LAYOUT: ClassVar[struct.Struct]

    @classmethod
    def unpack(cls, data: bytes | memoryview, offset: int = 0) -> Self:
        return cls(*cls.LAYOUT.unpack_from(data, offset))

    def pack(self) -> bytes:
        return self.LAYOUT.pack(*(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Header(Record):
    LAYOUT = struct.Struct("<8sIIQ16sII16s")
    magic: bytes
    format_version: int
    section_count: int
    file_size: int
    arch: bytes  # zero-padded ASCII: "cpu", "sm_90a", "sm_87"
    world_size: int
    rank: int
    table_digest: bytes  # first 16 bytes of sha256(header without this field + section table)


@dataclass(frozen=True)
class Section(Record):
    LAYOUT = struct.Struct("<IIQQQ32s")
    type: int
    flags: int
    offset: int
    size: int
    reserved: int
    sha256: bytes  # of the section's bytes; for WEIGHTS the digest of CHUNKS


@dataclass(frozen=True)
class ChunkHeader(Record):
    LAYOUT = struct.Struct("<IIQQQ64s32s")
    world_size: int
    rank: int
    chunk_bytes: int
    chunk_count: int
    total_bytes: int
    external_name: bytes  # zero-padded UTF-8 file name, empty when the weights are in the engine
    reserved: bytes


@dataclass(frozen=True)
class PlanHeader(Record):
    """Facts of the model that the runtime needs, then where each table of records begins (offsets in the section)."""

    LAYOUT = struct.Struct("<IIII IIII II QQ 18Q")
    plan_version: int
    world_size: int
    rank: int
    sm_count: int  # 0: buckets say theirs
    vocab_size: int
    max_context: int  # positions
    block_tokens: int  # positions a block of the block table covers
    rollback_rows: int  # how far below the highest position `truncate` may go
    hidden_size: int
    layer_count: int
    bos_token_id: int  # NO_INDEX as 64 bit when the model has none
    weight_bytes: int
    entry_points: int
    entry_point_count: int
    buckets: int
    bucket_count: int
    launches: int
    launch_count: int
    args: int
    arg_count: int
    tensors: int
    tensor_count: int
    states: int
    state_count: int
    kernels: int
    kernel_count: int
    eos_ids: int  # u32 each
    eos_count: int
    strings: int  # zero-terminated UTF-8
    strings_bytes: int


@dataclass(frozen=True)
class EntryPoint(Record):
    LAYOUT = struct.Struct("<IIII")
    name: int  # offset in the strings
    first_bucket: int
    bucket_count: int
    flags: int


@dataclass(frozen=True)
class Bucket(Record):
    """An engine for a GPU may hold the same buckets for several numbers of streaming multiprocessors."""

    LAYOUT = struct.Struct("<IIIIQII")
    kind: int
    tokens: int  # capacity T
    first_launch: int
    launch_count: int
    arena_bytes: int
    sm_count: int  # that the launches are for; 0: any
    reserved: int


@dataclass(frozen=True)
class Launch(Record):
    """One kernel call.

    On the cpu target the arguments are those of the operator's schema, then its outputs. On a GPU they are tensors
    only: the pointers that the kernel takes, in order. An operator may take several calls there; all but the last have
    the flag STAGE and no outputs.
    """

    LAYOUT = struct.Struct("<IIIIIIII QQ 3I3II I")
    kernel: int
    name: int  # of the graph node, offset in the strings
    layer: int  # NO_INDEX outside the layers
    flags: int
    first_arg: int
    arg_count: int
    output_count: int  # the last arguments
    cluster: int  # 0 on the cpu target, as the rest below
    bytes_moved: int
    flops: int
    grid_x: int
    grid_y: int
    grid_z: int
    block_x: int
    block_y: int
    block_z: int
    shared_bytes: int
    reserved: int


@dataclass(frozen=True)
class Arg(Record):
    """`value` is the tensor's index, the integer, or the bits of a float64."""

    LAYOUT = struct.Struct("<IIq")
    kind: int
    reserved: int
    value: int


@dataclass(frozen=True)
class Tensor(Record):
    """Strides count elements of `dtype`; unused dimensions have size 1 and stride 0."""

    LAYOUT = struct.Struct("<IIIIQ 4B4x 4Q4q")
    space: int
    dtype: int
    ndim: int
    index: int
    offset: int  # bytes in the space
    dim_0: int
    dim_1: int
    dim_2: int
    dim_3: int
    size_0: int
    size_1: int
    size_2: int
    size_3: int
    stride_0: int
    stride_1: int
    stride_2: int
    stride_3: int


@dataclass(frozen=True)
class State(Record):
    LAYOUT = struct.Struct("<IIIIIIQ")
    name: int
    kind: int
    dtype: int
    layer: int
    rows: int  # per slot, per block or per session
    ratio: int  # positions an entry stands for; 1 for rows that are positions
    row_bytes: int


@dataclass(frozen=True)
class Kernel(Record):
    """A kernel of the plan. `image_*` say where its machine code is in KERNELS (zero on the cpu target)."""

    LAYOUT = struct.Struct("<IIQQ")
    name: int  # the operator; several kernels may compute one
    entry: int  # symbol in the image, NO_INDEX on the cpu target
    image_offset: int
    image_bytes: int
