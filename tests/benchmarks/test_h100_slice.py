"""Generated weights of the slice: packed experts and constants as kernels read them."""

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4c.checkpoint.expert_packing import record_bytes, unpack_fp4, unpack_fp8
from dsv4c.checkpoint.formats import Encoding
from tests.benchmarks.h100_slice import generated_weights

HIDDEN, INNER = 512, 256
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp4_numbers(codes: Tensor, scales: Tensor) -> Tensor:
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
    values = table[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    return values * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)


def fp8_numbers(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)


def test_packed_experts_and_constants() -> None:
    fp4, fp8 = (record_bytes(kind, HIDDEN, INNER) for kind in (Encoding.FP4_GROUP, Encoding.FP8_BLOCK))
    topology, angles = [3, 0, 2, 1], [0.5, 0.25]
    extents = [
        [0, fp4, "fp4_group.packed", "weight"],
        [fp4 + 4096, fp8, "fp8_block.packed", "weight"],
        [fp4 + fp8 + 8192, 16, "constant.int32", topology],
        [fp4 + fp8 + 8256, 8, "constant.float32", angles],
    ]
    data = np.concatenate([np.frombuffer(block, np.uint8) for block in generated_weights(extents, fp4 + fp8 + 9000, 8)])
    assert len(data) == fp4 + fp8 + 9000
    records = [torch.from_numpy(data[offset : offset + size]) for offset, size, *_ in extents]
    matrices = [fp4_numbers(*matrix) for matrix in unpack_fp4(records[0], HIDDEN, INNER)]
    matrices += [fp8_numbers(*matrix) for matrix in unpack_fp8(records[1], HIDDEN, INNER)]
    for matrix in matrices:
        assert matrix.std().item() == pytest.approx(1 / 64, rel=0.3)
    assert records[2].view(torch.int32).tolist() == topology and records[3].view(torch.float32).tolist() == angles
