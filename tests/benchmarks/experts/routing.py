"""Logits that lead to a wanted routing, and what the kernel of the lists writes for it, made with torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.benchmarks.experts.manifest import Shape

_LOWEST_SCORE, _SCORES = 0.6, 0.8


def random_bias(experts: int, device: str = "cuda") -> Tensor:
    generator = torch.Generator(device).manual_seed(7)
    return torch.rand(experts, generator=generator, device=device) / 4 - 0.125


def uniform_ranks(tokens: int, experts: int, generator: torch.Generator) -> Tensor:
    """[T, E]: a random order of the experts for every row; rank E - 1 is the first choice."""
    return torch.rand((tokens, experts), generator=generator, device=generator.device).argsort(1).argsort(1)


def same_ranks(tokens: int, experts: int, generator: torch.Generator) -> Tensor:
    """All rows choose the same experts."""
    return uniform_ranks(1, experts, generator).expand(tokens, experts)


def hot_ranks(tokens: int, experts: int, generator: torch.Generator) -> Tensor:
    """All rows choose one expert, and others at random."""
    keys = torch.rand((tokens, experts), generator=generator, device=generator.device)
    keys[:, experts // 3] = 2
    return keys.argsort(1).argsort(1)


def logits_for(ranks: Tensor, bias: Tensor) -> Tensor:
    """Logits whose score plus bias ascends with the rank, in steps that no rounding can swap."""
    selected = _LOWEST_SCORE + _SCORES * (ranks.double() + 0.5) / ranks.shape[1]
    score = selected - bias.double()
    return torch.log(torch.expm1(score.square())).float()


@dataclass(frozen=True)
class Routing:
    """ids int64 and weights float64 [T, k], best choice first."""

    ids: Tensor
    weights: Tensor


def route(shape: Shape, logits: Tensor, bias: Tensor, hashed: Tensor | None) -> Routing:
    """By score and bias, or the experts in `hashed` [T, k]; in float64."""
    scores = torch.nn.functional.softplus(logits.double()).sqrt()
    ids = (scores + bias.double()).topk(shape.choices, 1).indices if hashed is None else hashed.long()
    chosen = scores.gather(1, ids)
    return Routing(ids, chosen / chosen.sum(1, keepdim=True) * shape.scale)


@dataclass(frozen=True)
class Lists:
    """As experts_lists writes them, by the names of the arguments."""

    list: Tensor  # int32 [P]
    places: Tensor  # int32 [V, 4]
    heads: Tensor  # int32 [groups + 1]


def make_lists(ids: Tensor, experts: int, tile: int, groups: int, table: tuple[int, ...] | None) -> Lists:
    """`table` is the row of the topology for this card; none for one group."""
    pairs = ids.flatten()
    order = torch.arange(experts, device=ids.device)
    first_rank = [0, experts]
    if groups > 1:
        assert table is not None
        order = torch.tensor(table[:experts], device=ids.device)
        first_rank = list(table[experts : experts + groups + 1])
    rank = torch.empty_like(order)
    rank[order] = torch.arange(experts, device=ids.device)
    by_place = rank[pairs].sort(stable=True).indices
    counts = torch.bincount(rank[pairs], minlength=experts).tolist()
    places, heads, first = [], [0] * (groups + 1), 0
    experts_by_rank = order.tolist()
    for group in range(groups):
        heads[group] = len(places)
        for r in range(first_rank[group], first_rank[group + 1]):
            for start in range(0, counts[r], tile):
                places.append((experts_by_rank[r], first + start, min(tile, counts[r] - start), 0))
            first += counts[r]
    heads[groups] = len(places)
    return Lists(
        by_place.int(),
        torch.tensor(places, dtype=torch.int32, device=ids.device).view(len(places), 4),
        torch.tensor(heads, dtype=torch.int32, device=ids.device),
    )


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [T, D] and float32 scales [T, D / 128]: a power of two for 128 columns."""
    grouped = x.float().view(len(x), x.shape[1] // 128, 128)
    # The division by 448 rounds as in the kernels; the next power of two is then exact.
    bits = (grouped.abs().amax(-1).clamp(min=1e-4) / 448).view(torch.int32)
    scale = (bits + 0x7FFFFF & 0x7F800000).view(torch.float32)
    codes = (grouped / scale.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(x.shape), scale


def permuted(codes: Tensor) -> Tensor:
    """Within 32 columns, as the kernels read them: first columns 8i..8i+3 of the four eights, then 8i+4..8i+7."""
    data = codes.view(torch.uint8).view(len(codes), codes.shape[1] // 32, 4, 2, 4)
    return data.transpose(2, 3).reshape(codes.shape).view(torch.float8_e4m3fn)


def f16_rows(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same in f16 for the kernel of large steps: [T, D], times the multipliers [T]."""
    multipliers = 128 / scale.amax(1)
    values = (dequantized(codes, scale) * multipliers.double().unsqueeze(1)).half()
    by_piece = values.view(len(codes), codes.shape[1] // 32, 4, 4, 2).transpose(2, 3)
    return by_piece.reshape(codes.shape), multipliers


def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    return (codes.double().view(*scale.shape, 128) * scale.double().unsqueeze(-1)).view(codes.shape)
