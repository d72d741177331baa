"""State planes for kernel tests: poisoned until written, in every storage format, behind a shuffled block table."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4c.graph.state_ops import packed_row_bytes, packed_scale_bytes


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Every byte 0xFF: a NaN in the float formats, and in an exponent."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((size,), 0xFF, dtype=torch.uint8).view(dtype).view(shape)


@dataclass
class Plane:
    data: Tensor
    scales: Tensor | None

    def clone(self) -> "Plane":
        data = self.data.view(torch.uint8).clone().view(self.data.dtype)
        return Plane(data, None if self.scales is None else self.scales.clone())

    def tensors(self) -> list[Tensor]:
        return [self.data] if self.scales is None else [self.data, self.scales]


def kv_plane(outer: int, rows: int, head_dim: int, rotary_dim: int, storage: str) -> Plane:
    if storage == "packed":
        data = poisoned(outer, rows, packed_row_bytes(head_dim, rotary_dim), dtype=torch.uint8)
        return Plane(data, poisoned(outer, rows, packed_scale_bytes(head_dim, rotary_dim), dtype=torch.uint8))
    return Plane(poisoned(outer, rows, head_dim, dtype=getattr(torch, storage)), None)


def key_plane(blocks: int, rows: int, width: int, storage: str) -> Plane:
    if storage in ("float32", "bfloat16"):
        return Plane(poisoned(blocks, rows, width, dtype=getattr(torch, storage)), None)
    scales = poisoned(blocks, rows, -(-width // 32), dtype=torch.uint8)
    if storage == "fp8":
        return Plane(poisoned(blocks, rows, width, dtype=torch.float8_e4m3fn), scales)
    return Plane(poisoned(blocks, rows, width // 2, dtype=torch.float4_e2m1fn_x2), scales)


def block_table(slots: int, blocks_per_slot: int) -> Tensor:
    """int32 [S, M] with the blocks in an order that is no slot's own."""
    order = torch.randperm(slots * blocks_per_slot, generator=torch.Generator().manual_seed(5))
    return order.to(torch.int32).view(slots, blocks_per_slot)


class Positions:
    """Hands out steps: slots and positions int32 [T], rows of different slots interleaved at random."""

    def __init__(self, slots: int) -> None:
        self.lengths = [0] * slots
        self._generator = torch.Generator().manual_seed(9)

    def step(self, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        slots = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        slots = slots[torch.randperm(len(slots), generator=self._generator)]
        positions = []
        for slot in slots.tolist():
            positions.append(self.lengths[slot])
            self.lengths[slot] += 1
        return slots.to(torch.int32), torch.tensor(positions, dtype=torch.int32)
