"""Whether a stored tensor can hold a weight: its dtype, its shape, its scales."""

from dsv4c.checkpoint.formats import FP4_GROUP, Encoding
from dsv4c.checkpoint.safetensors import StoredTensor
from dsv4c.checkpoint.tensor_classes import DENSE, EXPERT
from dsv4c.errors import CheckpointError

_FLOATS = {"F32": Encoding.F32, "BF16": Encoding.BF16, "F16": Encoding.F16}
_SCALE_DTYPES = ("F8_E8M0", "U8", "F32")
_PACKED_DTYPES = ("I8", "U8")


def _describe(name: str, stored: StoredTensor) -> str:
    alias = "" if stored.name == name else f" ({name})"
    return f"{stored.shard}: tensor `{stored.name}`{alias}"


def _check_shape(name: str, stored: StoredTensor, expected: tuple[int, ...], what: str, hint: str | None) -> None:
    if stored.shape != expected:
        raise CheckpointError(
            f"{_describe(name, stored)} has shape {list(stored.shape)}, expected {list(expected)}{what}", hint=hint
        )


def _encoding_of(name: str, stored: StoredTensor) -> Encoding:
    if name.endswith(".tid2eid"):
        if stored.dtype != "I64":
            raise CheckpointError(
                f"{_describe(name, stored)} is {stored.dtype}, expected I64: it holds expert ids, "
                "which a cast to a smaller type can change",
                hint="take the table from the released checkpoint; a model-wide dtype cast has altered this one",
            )
        return Encoding.INT64
    if stored.dtype in _FLOATS:
        return _FLOATS[stored.dtype]
    expert = bool(EXPERT.fullmatch(name))
    if stored.dtype == "F8_E4M3" and (expert or DENSE.fullmatch(name)):
        return Encoding.FP8_BLOCK
    if stored.dtype in _PACKED_DTYPES and expert:
        return Encoding.FP4_GROUP
    readable = list(_FLOATS)
    if expert or DENSE.fullmatch(name):
        readable.append("F8_E4M3")
    if expert:
        readable.append("I8 or U8 (packed FP4)")
    raise CheckpointError(
        f"{_describe(name, stored)} is {stored.dtype}, expected {', '.join(readable)}",
        hint="dsv4c reads what the released checkpoints and transformers write; convert the checkpoint",
    )


def check_storage(
    name: str, shape: tuple[int, ...], stored: StoredTensor, scales: StoredTensor | None, fp8_block: tuple[int, int]
) -> tuple[Encoding, tuple[int, int] | None]:
    """How a weight is stored, and its block of values per scale (None for unquantised weights).

    name: official. shape: logical. Raises CheckpointError, naming file, tensor, found and expected, when dtype, shape
    or scales do not fit.
    """
    encoding = _encoding_of(name, stored)
    if encoding not in (Encoding.FP8_BLOCK, Encoding.FP4_GROUP):
        _check_shape(name, stored, shape, "", "config.json and weights may be of different models")
        if scales is not None:
            raise CheckpointError(
                f"{_describe(name, stored)} is {stored.dtype} and yet has scales, `{scales.name}`",
                hint="only FP8 and FP4 weights have scales; the conversion of this checkpoint went wrong",
            )
        return encoding, None
    rows, columns = shape
    if encoding is Encoding.FP4_GROUP:
        block = (1, FP4_GROUP)
        if columns % FP4_GROUP:
            raise CheckpointError(
                f"{_describe(name, stored)} is FP4 with an input size of {columns}, expected a multiple of {FP4_GROUP}"
            )
        _check_shape(
            name,
            stored,
            (rows, columns // 2),
            f": FP4, two of {columns} columns a byte",
            f"{stored.dtype} weights are read as packed FP4; INT8 checkpoints are not supported",
        )
    else:
        block = fp8_block
        _check_shape(name, stored, shape, "", "config.json and weights may be of different models")
    if scales is None:
        raise CheckpointError(
            f"{_describe(name, stored)} is {stored.dtype} but has no scales",
            hint="the checkpoint must have a `.scale` (or `_scale_inv`) tensor for each quantised weight",
        )
    if scales.dtype not in _SCALE_DTYPES:
        raise CheckpointError(
            f"{scales.shard}: scales `{scales.name}` are {scales.dtype}, expected {', '.join(_SCALE_DTYPES)}",
            hint="scales are UE8M0 exponent bytes or fp32",
        )
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    if scales.shape != grid:
        raise CheckpointError(
            f"{scales.shard}: scales `{scales.name}` of {name} have shape {list(scales.shape)}, "
            f"expected {list(grid)}: one per {block[0]} x {block[1]} block of {rows} x {columns}",
            hint="the block size is `quantization_config.weight_block_size`"
            if encoding is Encoding.FP8_BLOCK
            else None,
        )
    return encoding, block
