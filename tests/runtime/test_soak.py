"""Many random steps of several slots, with resets, truncations, forks, saves and restores in between.

After every step one slot is compared with a fresh session that is given the slot's tokens at once: whatever a slot has
been through, its state is that of its tokens. Now and then the eager oracle says the same.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest

from dsv4c.checkpoint.checkpoint import open_checkpoint
from dsv4c.errors import SessionError
from dsv4c.graph.builder import build_graph
from dsv4c.graph.interpreter import Oracle
from dsv4c.passes.pass_manager import PassContext, run_passes
from dsv4c.passes.pipeline import build_pipeline
from dsv4c.recipe import Recipe
from dsv4c.runtime.engine import Engine
from dsv4c.runtime.session import Session
from tests.model_cases import Logits, checkpoint_of, engine_of

MODEL = "narrow"
SLOTS = 4
CONTEXT = 96
RECIPE = Recipe.for_target("cpu", None).with_overrides(numerics="exact")


@dataclass
class Slot:
    tokens: list[int] = field(default_factory=list)
    highest: int = 0  # since the last reset


@dataclass
class Soak:
    """A session and what its slots must hold."""

    session: Session
    rng: np.random.Generator
    vocab_size: int
    rollback: int
    slots: list[Slot] = field(default_factory=lambda: [Slot() for _ in range(SLOTS)])
    saved: list[tuple[bytes, Slot]] = field(default_factory=list)

    def pick(self) -> int:
        return int(self.rng.integers(SLOTS))

    def disturb(self) -> None:
        """One random call between two steps."""
        number = self.pick()
        slot = self.slots[number]
        match int(self.rng.integers(12)):
            case 0:
                self.session.reset(number)
                self.slots[number] = Slot()
            case 1 | 2 | 3:
                self.truncate(number, int(self.rng.integers(max(0, len(slot.tokens) - 6), len(slot.tokens) + 1)))
            case 4 | 5:
                other = self.pick()
                self.session.fork(number, other)
                self.slots[other] = Slot(list(slot.tokens), slot.highest)
            case 6 | 7:
                self.saved = [*self.saved[-5:], (self.session.save(number), Slot(list(slot.tokens), slot.highest))]
            case 8 | 9 if self.saved:
                data, before = self.saved[int(self.rng.integers(len(self.saved)))]
                self.session.restore(number, data)
                self.slots[number] = Slot(list(before.tokens), before.highest)
            case _:
                with pytest.raises(SessionError):
                    self.session.step([0], [number], [len(slot.tokens) + 1])

    def truncate(self, number: int, position: int) -> None:
        slot = self.slots[number]
        if position == 0:
            self.session.truncate(number, 0)
            self.slots[number] = Slot()
        elif position < slot.highest - self.rollback:
            with pytest.raises(SessionError, match="can be truncated to 0 or to"):
                self.session.truncate(number, position)
        else:
            self.session.truncate(number, position)
            del slot.tokens[position:]

    def step(self) -> tuple[int, Logits]:
        """Random rows of random slots in one step; a slot of it and the logits of the slot's rows."""
        count = int(self.rng.choice([1, 1, 2, 5, 20]))
        room = [number for number in range(SLOTS) if len(self.slots[number].tokens) + count <= CONTEXT]
        if not room:
            self.session.reset(0)
            self.slots[0] = Slot()
            room = [0]
        chosen = self.rng.choice(room, int(self.rng.integers(1, len(room) + 1)), replace=False)
        order = self.rng.permutation(np.repeat(chosen, self.rng.integers(1, count + 1, len(chosen)))).tolist()
        token_ids, positions = [], []
        for number in order:
            slot = self.slots[number]
            token_ids.append(int(self.rng.integers(self.vocab_size)))
            positions.append(len(slot.tokens))
            slot.tokens.append(token_ids[-1])
        for number in set(order):
            self.slots[number].highest = max(self.slots[number].highest, len(self.slots[number].tokens))
        logits = self.session.step(token_ids, order, positions)
        watched = int(self.rng.choice(chosen))
        return watched, logits[[row for row, number in enumerate(order) if number == watched]]


@pytest.mark.parametrize(
    ("steps", "oracle_every"), [(150, 50), pytest.param(2000, 100, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_a_slot_is_what_its_tokens_make_it(steps: int, oracle_every: int) -> None:
    checkpoint = open_checkpoint(checkpoint_of(MODEL, "fp8_fp4"))
    gm = build_graph(checkpoint.config, checkpoint.weights, "exact", RECIPE.rollback_rows)
    gm = run_passes(gm, build_pipeline(), PassContext(RECIPE.target, RECIPE))
    with (
        Engine.open(engine_of(MODEL, "fp8_fp4", "exact"), threads=2) as engine,
        engine.session(slots=SLOTS, context=CONTEXT, poison=True) as session,
        engine.session(context=CONTEXT) as fresh,
    ):
        soak = Soak(session, np.random.default_rng(steps), engine.info.vocab_size, engine.info.rollback_rows)
        for number in range(steps):
            if soak.rng.random() < 0.4:
                soak.disturb()
            watched, logits = soak.step()
            tokens = soak.slots[watched].tokens
            fresh.reset(0)
            whole = tokens, [0] * len(tokens), list(range(len(tokens)))
            expected = fresh.step(*whole)[-len(logits) :]
            np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5, err_msg=f"step {number}, slot {watched}")
            if number % oracle_every == oracle_every - 1:
                oracle = Oracle(gm, checkpoint, slots=1, context=CONTEXT, poison=True)
                by_oracle = oracle.step(*whole).numpy()[-len(logits) :]
                np.testing.assert_allclose(logits, by_oracle, rtol=0, atol=1e-3, err_msg=f"step {number}")
        for number, slot in enumerate(soak.slots):
            assert session.length(number) == len(slot.tokens)
