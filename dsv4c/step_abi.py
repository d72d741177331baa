"""The numbers that the compiler, the engine file and the runtime agree on: dtypes, inputs, dimensions, kinds.

They are written into engines, so a number once used keeps its meaning. Standard library only.
"""

import enum


class DType(enum.IntEnum):
    F32 = 1
    BF16 = 2
    F16 = 3
    F8E4M3 = 4
    F8E8M0 = 5  # an exponent: 2^(byte - 127)
    U8 = 6
    I8 = 7
    I32 = 8
    I64 = 9
    F4E2M1X2 = 10  # two e2m1 codes a byte, the lower nibble first; shapes and strides count bytes

    @property
    def size_bytes(self) -> int:
        return {DType.F32: 4, DType.I32: 4, DType.I64: 8, DType.BF16: 2, DType.F16: 2}.get(self, 1)


class Space(enum.IntEnum):
    """Where a tensor of the plan lives; `index` is used by STATE, INPUT and OUTPUT."""

    ARENA = 1
    WEIGHT = 2
    STATE = 3
    INPUT = 4
    OUTPUT = 5


class Dim(enum.IntEnum):
    """A dimension that is not a constant; its capacity in the record is that of the bucket (0 for S, B, M)."""

    FIXED = 0
    TOKENS = 1  # T: rows of this step
    LOGITS = 2  # R: rows that want logits
    SLOTS = 3  # S: slots of the session
    BLOCKS = 4  # B: state blocks of the session
    TABLE = 5  # M: blocks of one slot


class Input(enum.IntEnum):
    """Inputs of the step, in the order of the graph."""

    TOKEN_IDS = 0  # int32 [T]
    SLOTS = 1  # int32 [T]
    POSITIONS = 2  # int32 [T]
    BLOCK_TABLE = 3  # int32 [S, M]
    LOGITS_ROWS = 4  # int32 [R]
    TEMPERATURE = 5  # float32 [R]
    TOP_K = 6  # int32 [R]
    TOP_P = 7  # float32 [R]
    SEED = 8  # int64 [R]
    MASK = 9  # int32 [R, ceil(V/32)], may be absent


class Output(enum.IntEnum):
    LOGITS = 0  # float32 [R, V]
    SAMPLED = 1  # int32 [R]


class BucketKind(enum.IntEnum):
    DECODE = 1  # at most one row a slot
    MIXED = 2


class StateKind(enum.IntEnum):
    SLOT = 1  # `rows` rows a slot
    BLOCK = 2  # `rows` rows a block of the block table
    ROUTING_COUNTS = 3  # int64 `rows`, one plane a session: how often each expert of the layer was chosen

    @property
    def unit(self) -> str:
        """What of a session has the plane's rows."""
        return {StateKind.SLOT: "slot", StateKind.BLOCK: "block"}.get(self, "session")

    def units(self, slots: int, blocks: int) -> int:
        """How many of them a session of that many slots and blocks has."""
        return {StateKind.SLOT: slots, StateKind.BLOCK: blocks}.get(self, 1)


class LaunchFlag(enum.IntFlag):
    HEAD = 1  # runs only when logits are asked for
    SAMPLE = 2  # runs only when tokens are asked for
    STAGE = 4  # more calls of the same operator follow
    COOPERATIVE = 8  # all blocks run at once and may wait for one another
    PROGRAMMATIC = 16  # may start before the call before it, of the same operator, has ended, and waits for it itself


class ArgKind(enum.IntEnum):
    NONE = 0  # an absent optional tensor
    TENSOR = 1  # index of a tensor record
    INT = 2  # also bool and dtype
    FLOAT = 3
