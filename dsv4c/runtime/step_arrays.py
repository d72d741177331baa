"""A step's token ids, slots, positions and masks as the int32 arrays that the library reads."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dsv4c.errors import SessionError
from dsv4c.runtime import library as lib

IntArray = npt.NDArray[np.int32]
Ids = Sequence[int] | npt.NDArray[np.integer[Any]]

INT32_MAX = 2**31 - 1


def int32_array(values: Ids, name: str) -> IntArray:
    array = np.asarray(values)
    if array.ndim != 1:
        raise SessionError(f"{name} has {array.ndim} dimensions, expected 1")
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu" or array.min() < -INT32_MAX - 1 or array.max() > INT32_MAX:
        raise SessionError(f"{name} must be integers of 32 bits, found {array.dtype}")
    return np.ascontiguousarray(array, np.int32)


def address_of(array: npt.NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data


class StepArrays:
    """Arrays of a step and the C struct that points to them."""

    def __init__(self, token_ids: Ids, slots: Ids, positions: Ids, logits_rows: Ids | None, flags: int = 0) -> None:
        self.token_ids = int32_array(token_ids, "token_ids")
        self.slots = int32_array(slots, "slots")
        self.positions = int32_array(positions, "positions")
        self.logits_rows = None if logits_rows is None else int32_array(logits_rows, "logits_rows")
        rows = len(self.token_ids)
        if len(self.slots) != rows or len(self.positions) != rows:
            raise SessionError(
                f"a step has {rows} token ids, {len(self.slots)} slots and {len(self.positions)} positions; "
                "it needs one of each per row"
            )
        self.output_rows = rows if self.logits_rows is None else len(self.logits_rows)
        self.struct = lib.Step(
            struct_size=ctypes.sizeof(lib.Step),
            row_count=rows,
            token_ids=address_of(self.token_ids),
            slots=address_of(self.slots),
            positions=address_of(self.positions),
            logits_rows=address_of(self.logits_rows),
            logits_count=lib.ALL_ROWS if self.logits_rows is None else len(self.logits_rows),
            flags=flags,
        )

    def pointer(self) -> Any:
        return ctypes.byref(self.struct)


def mask_words(masks: npt.NDArray[Any], rows: int, vocab_size: int) -> IntArray:
    """int32 [rows, ceil(vocab/32)], lowest bit first, of such words or of bool [rows, vocab]."""
    width = -(-vocab_size // 32)
    masks = np.asarray(masks)
    if masks.dtype == np.bool_ and masks.shape == (rows, vocab_size):
        padded = np.zeros((rows, 32 * width), np.bool_)
        padded[:, :vocab_size] = masks
        return np.packbits(padded, axis=1, bitorder="little").view("<i4")
    if masks.dtype in (np.int32, np.uint32) and masks.shape == (rows, width):
        return np.ascontiguousarray(masks).view(np.int32)
    raise SessionError(
        f"masks are {masks.dtype} {list(masks.shape)}, expected bool {[rows, vocab_size]} or int32 {[rows, width]}"
    )
