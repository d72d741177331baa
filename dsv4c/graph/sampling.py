"""Sampling, the last operator of the step, and its counter-based random generator.

The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed with
the request's seed and counted by the position of the row. The same request therefore draws the same numbers whatever
else runs beside it, on every target.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def philox(seed: int, counter: int) -> tuple[int, int, int, int]:
    """Four 32-bit words of Philox-4x32-10 for a 64-bit key and the low 64 bits of the counter."""
    c = [counter & _MASK, counter >> 32 & _MASK, 0, 0]
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    for _ in range(10):
        low, high = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [high >> 32 & _MASK ^ c[1] ^ k0, high & _MASK, low >> 32 & _MASK ^ c[3] ^ k1, low & _MASK]
        k0, k1 = k0 + 0x9E3779B9 & _MASK, k1 + 0xBB67AE85 & _MASK
    return c[0], c[1], c[2], c[3]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 24 bits, from the first word."""
    return (philox(seed, position)[0] >> 8) * 2.0**-24


def allowed(mask_row: Tensor, vocab_size: int) -> Tensor:
    """bool [V] of one row of a bit mask: int32 words, lowest bit first."""
    words = mask_row.view(torch.uint8).reshape(-1, 1)
    bits = words >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten()[:vocab_size].bool()


@torch.library.custom_op("dsv4::sample", mutates_args=())
def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """One token id per row of logits: int32 [R], -1 where the mask allows none.

    logits float32 [R, V]; rows int32 [R] are the step's rows they belong to, positions int32 [T]. temperature float32
    [R] (0: the largest logit, ties to the lower id); top_k int32 [R] (0: all); top_p float32 [R] (1: all); seed int64
    [R]; mask int32 [R, ceil(V/32)], bit set = allowed. Candidates are ordered by logit, then id; top-k comes before
    top-p, which keeps the shortest prefix whose probability reaches it; the draw inverts the running sum at
    `uniform(seed, position)`.
    """
    out = torch.full((logits.shape[0],), -1, dtype=torch.int32)
    for row in range(logits.shape[0]):
        values = logits[row].double()
        if mask is not None:
            values = values.masked_fill(~allowed(mask[row], logits.shape[1]), -torch.inf)
        ordered, ids = values.sort(descending=True, stable=True)
        if ordered[0] == -torch.inf:
            continue
        if temperature[row] <= 0:
            out[row] = ids[0]
            continue
        if int(top_k[row]) > 0:
            ordered = ordered[: int(top_k[row])]
        running = torch.exp((ordered - ordered[0]) / float(temperature[row])).cumsum(0)
        kept = min(int((running < float(top_p[row]) * running[-1]).sum()) + 1, len(running))
        target = uniform(int(seed[row]), int(positions[int(rows[row])])) * float(running[kept - 1])
        out[row] = ids[min(int((running <= target).sum()), kept - 1)]
    return out


@sample.register_fake
def _(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    mask: Tensor | None,
) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int32)
