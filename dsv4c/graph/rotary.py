"""Rotary frequencies, plain and with YaRN (spec 2.5)."""

import math

import torch

from dsv4c.checkpoint.config import ModelConfig, YarnScaling


def plain_frequencies(theta: float, rotary_dim: int) -> torch.Tensor:
    """theta^(-2i/rotary_dim), float32 [rotary_dim/2]."""
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def _correction_channel(rotations: float, theta: float, rotary_dim: int, yarn: YarnScaling) -> float:
    """The channel pair that turns `rotations` times over the original context."""
    return (
        rotary_dim * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))
    )


def yarn_frequencies(theta: float, rotary_dim: int, yarn: YarnScaling) -> torch.Tensor:
    """Fast channels keep their frequency, slow ones are divided by the factor, with a linear ramp between.

    float32 [rotary_dim/2]. No magnitude factor: the model was trained without one.
    """
    base = theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    low = max(math.floor(_correction_channel(yarn.beta_fast, theta, rotary_dim, yarn)), 0)
    high = min(math.ceil(_correction_channel(yarn.beta_slow, theta, rotary_dim, yarn)), rotary_dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (yarn.factor * base) * (1 - keep) + 1.0 / base * keep


def layer_frequencies(config: ModelConfig, compressed: bool) -> torch.Tensor:
    """Frequencies of a layer: the plain base for window layers, the compressed base (with YaRN) for all others."""
    if not compressed:
        return plain_frequencies(config.rope_theta, config.rotary_dim)
    if config.yarn is None:
        return plain_frequencies(config.compress_rope_theta, config.rotary_dim)
    return yarn_frequencies(config.compress_rope_theta, config.rotary_dim, config.yarn)
