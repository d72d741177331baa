"""A step drawn through a topology: who does what, and who would be done last."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dsv4c.errors import InputError
from dsv4c.graph.topology import Topology, Work
from dsv4c.plan.expert_hits import sample_hits
from dsv4c.topology_view.stored import StoredTopology

DEFAULT_TOKENS = 8


@dataclass(frozen=True)
class Step:
    """`hit` has (expert, pairs) by expert; `origin` says where it comes from.

    A place has up to `place_pairs`, and SMs do the places in two halves or all in a row.
    """

    stored: StoredTopology
    hit: tuple[tuple[int, int], ...]
    tokens: int
    origin: str
    place_pairs: int
    halves: bool

    @property
    def topology(self) -> Topology:
        return self.stored.topology

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """By SM."""
        sms = range(self.topology.sm_count)
        return tuple(self.topology.work(sm, self.hit, self.place_pairs, self.halves) for sm in sms)

    @cached_property
    def read_bytes(self) -> tuple[int, ...]:
        """Weights that each SM reads."""
        up, down = self.stored.unit_bytes
        return tuple(len(work.up) * up + len(work.down) * down for work in self.works)

    @property
    def places(self) -> int:
        return sum(-(-pairs // self.place_pairs) for _, pairs in self.hit)

    @property
    def mean_bytes(self) -> float:
        """What each SM would read if all read as much."""
        return sum(self.read_bytes) / len(self.read_bytes)

    @property
    def imbalance(self) -> float:
        """How much more than that the busiest SM reads."""
        return max(self.read_bytes) / self.mean_bytes if self.mean_bytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "origin": self.origin,
            "tokens": self.tokens,
            "place_pairs": self.place_pairs,
            "halves": self.halves,
            "places": self.places,
            "hit": [{"expert": expert, "pairs": pairs} for expert, pairs in self.hit],
            "busiest_bytes": max(self.read_bytes),
            "mean_bytes": round(self.mean_bytes),
            "imbalance": self.imbalance,
            "sms": [
                {
                    "sm": sm,
                    "first_phase": [unit._asdict() for unit in work.up],
                    "second_phase": [unit._asdict() for unit in work.down],
                    "read_bytes": size,
                }
                for sm, (work, size) in enumerate(zip(self.works, self.read_bytes, strict=True))
            ],
        }


def sample_step(stored: StoredTopology, tokens: int, seed: int) -> Step:
    """A step of `tokens` rows whose routing is uniform."""
    place_pairs, halves = stored.sharing(tokens)
    hit = sample_hits(stored.facts["experts"], stored.facts["per_token"], tokens, seed)
    return Step(stored, hit, tokens, f"uniform routing, seed {seed}", place_pairs, halves)


def given_step(stored: StoredTopology, text: str) -> Step:
    """A step that hits `EXPERT[:PAIRS],...`; it has as many rows as these pairs need."""
    experts, per_token = stored.facts["experts"], stored.facts["per_token"]
    pairs: dict[int, int] = {}
    for item in text.split(","):
        expert, _, count = item.strip().partition(":")
        if not all(part.isascii() and part.isdecimal() and len(part) < 9 for part in (expert, count or "1")):
            raise InputError(f"--hit has {item.strip()!r}", hint="write experts and their pairs, such as 3,17:2,200")
        number = int(expert)
        if number >= experts or number in pairs or int(count or "1") == 0:
            why = "is there twice" if number in pairs else "has no pairs" if number < experts else "is none"
            raise InputError(f"--hit: expert {number} {why}", hint=f"experts are 0 to {experts - 1}, each once")
        pairs[number] = int(count or "1")
    # A row has each expert once.
    tokens = max(-(-sum(pairs.values()) // per_token), *pairs.values())
    return Step(stored, tuple(sorted(pairs.items())), tokens, "as given", *stored.sharing(tokens))
