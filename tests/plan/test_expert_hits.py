"""Uniform routing: the sample agrees with the expectation."""

from statistics import mean

import pytest

from dsv4c.plan.expert_hits import distinct_experts, sample_hits


@pytest.mark.parametrize("tokens", (1, 8, 64))
def test_sample(tokens: int) -> None:
    samples = [sample_hits(256, 6, tokens, seed) for seed in range(200)]
    for hit in samples:
        assert sum(pairs for _, pairs in hit) == 6 * tokens
        assert all(0 <= expert < 256 and 1 <= pairs <= tokens for expert, pairs in hit)
    assert mean(map(len, samples)) == pytest.approx(distinct_experts(256, tokens, 6), rel=0.02)


def test_seed() -> None:
    assert sample_hits(256, 6, 4, 1) == sample_hits(256, 6, 4, 1) != sample_hits(256, 6, 4, 2)
