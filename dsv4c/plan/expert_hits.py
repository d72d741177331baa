"""Which experts a step hits when routing is uniform: their expected number, and a sample."""

import random
from collections import Counter


def distinct_experts(experts: int, tokens: int, k: int) -> float:
    """Expected number of experts that `tokens` rows of `k` uniform choices hit."""
    return experts * (1 - (1 - k / experts) ** tokens)


def sample_hits(experts: int, k: int, tokens: int, seed: int) -> tuple[tuple[int, int], ...]:
    """(expert, pairs) of a step of `tokens` rows, each with k different experts; the same seed gives the same."""
    chosen = random.Random(seed)
    pairs = Counter(expert for _ in range(tokens) for expert in chosen.sample(range(experts), k))
    return tuple(sorted(pairs.items()))
