"""The generation loop on an engine that says a given text: limits, end token, stop strings, timings."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest

from dsv4c.errors import InputError
from dsv4c.generation import GenerationLimits, GenerationResult, IdOutput, TextOutput, generate
from dsv4c.runtime.engine import Engine
from dsv4c.runtime.session import Sampling
from tests.test_text import TOKENIZER

EOS = 1


class ScriptedEngine:
    """Answers with fixed tokens and keeps what it was asked."""

    def __init__(self, answer: Sequence[int], max_context: int = 1000) -> None:
        self.answer = iter(answer)
        self.info = SimpleNamespace(max_context=max_context, eos_token_ids=(EOS,), vocab_size=4096)
        self.context = 0
        self.rows: list[int] = []

    @contextmanager
    def session(self, slots: int, context: int) -> Iterator["ScriptedEngine"]:
        assert slots == 1
        self.context = context
        yield self

    def sample(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int], logits_rows: object, _: object
    ) -> list[int]:
        assert list(positions) == list(range(len(self.rows), len(self.rows) + len(token_ids)))
        assert set(slots) == {0} and logits_rows == [len(token_ids) - 1]
        self.rows += [int(token) for token in token_ids]
        return [next(self.answer)]

    def routing_counts(self) -> str:
        return f"counts of {len(self.rows)} rows"


def run(
    answer: Sequence[int],
    *,
    prompt: Sequence[int] = (0, 5, 6),
    max_tokens: int = 50,
    context: int | None = None,
    stops: Sequence[str] = (),
    ids: bool = False,
    max_context: int = 1000,
) -> tuple[GenerationResult, list[str], ScriptedEngine]:
    engine = ScriptedEngine(answer, max_context)
    pieces: list[str] = []
    output = IdOutput() if ids else TextOutput(TOKENIZER, stops)
    limits = GenerationLimits(max_tokens, context)
    result = generate(cast("Engine", engine), prompt, limits, Sampling(), output, pieces.append)
    return result, pieces, engine


def test_end_token_ends_and_is_not_printed() -> None:
    result, pieces, _ = run([*TOKENIZER.encode("Hello there"), EOS, 9])
    assert (result.text, result.stop_reason) == ("Hello there", "eos")
    assert result.token_ids == [*TOKENIZER.encode("Hello there"), EOS]
    assert "".join(pieces) == result.text and "" not in pieces


def test_the_last_token_is_no_row_of_a_step() -> None:
    _, _, engine = run([7, 8, 9], prompt=(0, 5, 6), max_tokens=3)
    assert engine.rows == [0, 5, 6, 7, 8]


def test_counts_are_taken_at_the_end() -> None:
    engine, counts = ScriptedEngine([7, EOS, 9]), list[object]()
    limits = GenerationLimits(50)
    generate(cast("Engine", engine), [0, 5], limits, Sampling(), IdOutput(), lambda _: None, counts.append)
    assert counts == ["counts of 3 rows"]


def test_max_tokens() -> None:
    result, _, engine = run(TOKENIZER.encode("one two three four five"), max_tokens=2)
    assert (len(result.token_ids), result.stop_reason) == (2, "max_tokens")
    assert engine.context == 5


def test_context_ends_an_answer() -> None:
    result, _, engine = run([7] * 20, max_tokens=20, max_context=10)
    assert (len(result.token_ids), result.stop_reason, engine.context) == (7, "context", 10)


def test_stop_string_across_tokens() -> None:
    answer = TOKENIZER.encode("The end") + TOKENIZER.encode(" of it") + TOKENIZER.encode(" all")
    result, pieces, _ = run(answer, stops=["d of"])
    assert (result.text, result.stop_reason) == ("The en", "stop")
    assert "".join(pieces) == "The en"
    assert len(result.token_ids) < len(answer)


def test_text_held_for_a_stop_string_is_printed_at_the_end() -> None:
    answer = TOKENIZER.encode("ab")
    result, pieces, _ = run(answer, stops=["abc"], max_tokens=len(answer))
    assert result.text == "ab" == "".join(pieces)


def test_ids() -> None:
    result, pieces, _ = run([12, 7, EOS], ids=True)
    assert (result.text, pieces) == ("12 7", ["12", " 7"])


def test_statistics() -> None:
    result = GenerationResult("x", [5, 6, 7], "max_tokens", prompt_tokens=10, prefill_seconds=0.5, decode_seconds=0.25)
    assert (result.prefill_tokens_per_second, result.decode_tokens_per_second) == (20.0, 8.0)
    assert "prompt 10 tokens, prefill 20.0 tokens/s; generated 3 tokens, decode 8.0 tokens/s" in result.to_text()
    assert result.to_dict()["decode_tokens_per_second"] == 8.0


def test_one_token_has_no_decode_speed() -> None:
    result, _, _ = run([5], prompt=[3], max_tokens=1)
    assert result.decode_tokens_per_second == 0.0
    text = result.to_text()
    assert text.startswith("prompt 1 token, prefill ") and text.endswith("; generated 1 token; stopped by max_tokens")


@pytest.mark.parametrize(
    ("prompt", "context", "message"),
    [
        ([], None, "the prompt is empty"),
        ([1] * 10, None, "the prompt is 10 tokens and leaves no room in a context of 10"),
        ([1] * 8, 4, "the prompt is 8 tokens and leaves no room in a context of 4"),
        ([1], 11, "a context of 11 tokens is asked; the model has 10"),
        ([1, 4096], None, "token 4096 of the prompt is outside the model's vocabulary"),
        ([-1], None, "token -1 of the prompt is outside the model's vocabulary"),
    ],
)
def test_prompt_that_does_not_fit(prompt: list[int], context: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run([5], prompt=prompt, context=context, max_context=10)
