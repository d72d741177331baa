"""What a weight's stored values can get wrong: NaN and infinity, scales that decode to them, expert ids.

Every check takes the values of a piece of a tensor and costs little beside the hashing of its bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4c.checkpoint.formats import E8M0_BIAS, Encoding
from dsv4c.checkpoint.safetensors import StoredTensor
from dsv4c.errors import CheckpointError

_REPAIR = "the checkpoint is damaged, or its conversion went wrong; --no-check-values builds it all the same"
# Above these a scale times the largest code (448 < 2^9, 6 < 2^3) is beyond float32.
_LARGEST_EXPONENT = {Encoding.FP8_BLOCK: 128 - 9, Encoding.FP4_GROUP: 128 - 3}


@dataclass(frozen=True)
class StoredPart:
    """The codes or the scales of a weight where they lie in a shard. `label` is how errors call them."""

    label: str
    stored: StoredTensor
    encoding: Encoding
    scales: bool


def check_piece(part: StoredPart, values: Tensor, first: int) -> None:
    """Check flat `values` (the stored dtype) that begin at element `first` of a part; INT64 tables are not looked at.

    Raises CheckpointError naming the shard, the tensor and the first bad index.
    """
    if values.numel() == 0 or part.encoding is Encoding.INT64:
        return
    bad, what = _bad_values(part, values)
    if bad is None:
        return
    index = int(bad.nonzero()[0])
    place = ", ".join(str(i) for i in _unravel(first + index, part.stored.shape))
    raise CheckpointError(f"{part.label}[{place}] is {what or float(values[index])}", hint=_REPAIR)


def _bad_values(part: StoredPart, values: Tensor) -> tuple[Tensor | None, str]:
    """Where `values` are bad (None: nowhere), and what the first one is ("": its own number says it)."""
    if part.scales:
        return _bad_scales(part.encoding, values)
    if part.encoding is Encoding.FP4_GROUP:  # every code is a number
        return None, ""
    if part.encoding is not Encoding.FP8_BLOCK:
        return _not_finite(values), ""
    # e4m3 has no infinity and one NaN of either sign.
    magnitude = values.view(torch.uint8) & 0x7F
    return (magnitude == 0x7F if int(magnitude.max()) == 0x7F else None), "nan"


def _not_finite(values: Tensor) -> Tensor | None:
    """Where `values` are NaN or infinite; None where nowhere. One pass over memory unless something is found."""
    lowest, highest = torch.aminmax(values)
    if bool(torch.isfinite(lowest)) and bool(torch.isfinite(highest)):
        return None
    return ~torch.isfinite(values)


def _bad_scales(encoding: Encoding, values: Tensor) -> tuple[Tensor | None, str]:
    exponent = _LARGEST_EXPONENT[encoding]
    if values.dtype is torch.uint8:
        highest, limit = int(values.max()), exponent + E8M0_BIAS
        if highest <= limit:
            return None, ""
        above = values > limit
        byte = int(values[above.nonzero()[0]])
        return above, f"exponent byte {byte}, " + ("which is nan" if byte == 255 else "a scale beyond float32")
    bad = _not_finite(values)
    if bad is not None:
        return bad, ""
    if float(values.abs().max()) <= 2.0**exponent:
        return None, ""
    return values.abs() > 2.0**exponent, "a scale whose block can decode to infinity"


def _unravel(flat: int, shape: tuple[int, ...]) -> list[int]:
    index = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return index[::-1]


def check_expert_ids(label: str, ids: Tensor, experts: int) -> list[str]:
    """Check a whole hash table, int64 [V, k]. Returns warnings; raises CheckpointError where it cannot be used."""
    outside = ((ids < 0) | (ids >= experts)).nonzero()
    if len(outside):
        token, slot = (int(index) for index in outside[0])
        raise CheckpointError(
            f"{label}[{token}, {slot}] is {int(ids[token, slot])}, expected an expert id of 0..{experts - 1} "
            f"({len(outside)} such)",
            hint="a cast to bf16 alters ids above 256; take the table from the released checkpoint",
        )
    if not bool(ids.any()):
        raise CheckpointError(
            f"{label} is all zeros: no token has experts of its own",
            hint="the table was initialised but never loaded; take it from the released checkpoint",
        )
    zero_rows = (ids == 0).all(dim=1)
    ordered = ids.sort(dim=1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1) & ~zero_rows
    messages = []
    if zeros := int(zero_rows.sum()) if ids.shape[1] > 1 else 0:
        messages.append(f"{label}: {zeros} rows are all zeros (padding of the vocabulary?)")
    if repeats := int(repeated.sum()):
        messages.append(f"{label}: {repeats} rows name an expert twice, first token {int(repeated.nonzero()[0])}")
    return messages
