"""How results of kernels are compared with those of reference bodies."""

import torch
from torch import Tensor

from tests.kernels.step_memory import bits


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert torch.equal(bits(actual), bits(expected.contiguous())), f"{_differing(actual, expected):.2%} differ"


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-6, flips: float = 0.02) -> None:
    """Float32 within `tolerance` of the largest expected value, since a sum in another order errs by that; bfloat16
    within one unit in the last place, and few values (`flips` of them) that lie at a rounding border."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    if not expected.dtype.is_floating_point:
        assert torch.equal(actual, expected)
        return
    scale = float(expected.float().abs().max()) if expected.numel() else 0.0
    relative = 2.0**-7 if expected.dtype is torch.bfloat16 else tolerance
    torch.testing.assert_close(actual.float(), expected.float(), rtol=relative, atol=tolerance * scale + 1e-30)
    if expected.dtype is torch.bfloat16 and expected.numel() > 1:
        allowed = max(flips, 1.5 / expected.numel())
        assert _differing(actual, expected) <= allowed, f"{_differing(actual, expected):.2%} differ by a unit"


def _differing(actual: Tensor, expected: Tensor) -> float:
    return float((bits(actual) != bits(expected.contiguous())).float().mean())
