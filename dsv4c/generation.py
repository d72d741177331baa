"""`dsv4c run` without the terminal: prompt token ids in, text or ids out piece by piece, with timings."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from dsv4c.errors import InputError
from dsv4c.runtime.engine import Engine, continue_prompt
from dsv4c.runtime.session import RoutingCounts, Sampling
from dsv4c.runtime.step_arrays import int32_array
from dsv4c.text import IncrementalDecoder, StopStrings, Tokenizer
from dsv4c.wording import counted

# eos: an end token; stop: a stop string; max_tokens, context: the limit that was reached.
StopReason = Literal["eos", "stop", "max_tokens", "context"]


@dataclass(frozen=True)
class GenerationLimits:
    """`context` is the number of positions to make room for; None: what prompt and `max_tokens` need."""

    max_tokens: int
    context: int | None = None


@dataclass(frozen=True)
class Room:
    """What the limits come to for a prompt: positions of the session, and how many tokens can follow."""

    context: int
    max_tokens: int


@dataclass(frozen=True)
class GenerationResult:
    """`prefill_seconds` runs from the prompt to the first token, `decode_seconds` over the tokens after it."""

    text: str
    token_ids: list[int]  # as sampled: with the end token, and with what a stop string cut off the text
    stop_reason: StopReason
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return (len(self.token_ids) - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, object]:
        return {
            **asdict(self),
            "prefill_tokens_per_second": round(self.prefill_tokens_per_second, 2),
            "decode_tokens_per_second": round(self.decode_tokens_per_second, 2),
        }

    def to_text(self) -> str:
        """The statistics, one line."""
        # The first token comes out of the prefill: it alone says nothing of the speed of decoding.
        decode = f", decode {self.decode_tokens_per_second:.1f} tokens/s" if len(self.token_ids) > 1 else ""
        return (
            f"prompt {counted(self.prompt_tokens, 'token')}, prefill {self.prefill_tokens_per_second:.1f} tokens/s; "
            f"generated {counted(len(self.token_ids), 'token')}{decode}; stopped by {self.stop_reason}"
        )


class TextOutput:
    """Token ids -> printable text, cut before a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        return self._stops.matched

    def feed(self, token_id: int) -> str:
        return self._stops.feed(self._decoder.feed(token_id))

    def finish(self) -> str:
        return self._stops.finish()


class IdOutput:
    """Token ids as decimal numbers, separated by spaces."""

    stopped = False

    def __init__(self) -> None:
        self._separator = ""

    def feed(self, token_id: int) -> str:
        text = f"{self._separator}{token_id}"
        self._separator = " "
        return text

    def finish(self) -> str:
        return ""


def generate(
    engine: Engine,
    prompt_ids: Sequence[int],
    limits: GenerationLimits,
    sampling: Sampling,
    output: TextOutput | IdOutput,
    emit: Callable[[str], None],
    take_counts: Callable[[RoutingCounts], None] | None = None,
) -> GenerationResult:
    """Continues `prompt_ids`, passing every printable piece of the answer to `emit` as soon as it is known.

    `take_counts` is given how often each expert was chosen, by the prompt and by every token of the answer but the
    last, which no step has run.
    """
    room = room_for(engine, prompt_ids, limits)
    reason: StopReason = "max_tokens" if room.max_tokens == limits.max_tokens else "context"
    token_ids: list[int] = []
    pieces: list[str] = []

    def put(text: str) -> None:
        if text:
            pieces.append(text)
            emit(text)

    prompt = int32_array(prompt_ids, "prompt_ids")
    started = first = last = time.perf_counter()
    with engine.session(1, room.context) as session:
        for token_id in continue_prompt(session, prompt, room.max_tokens, sampling):
            last = time.perf_counter()
            first = first if token_ids else last
            token_ids.append(token_id)
            if token_id in engine.info.eos_token_ids:
                reason = "eos"
                break
            put(output.feed(token_id))
            if output.stopped:
                reason = "stop"
                break
        put(output.finish())
        if take_counts is not None:
            take_counts(session.routing_counts())
    return GenerationResult(
        text="".join(pieces),
        token_ids=token_ids,
        stop_reason=reason,
        prompt_tokens=len(prompt_ids),
        prefill_seconds=first - started,
        decode_seconds=last - first,
    )


def room_for(engine: Engine, prompt_ids: Sequence[int], limits: GenerationLimits) -> Room:
    """Room for no more than is asked, as state grows with it. Raises InputError where the prompt does not fit."""
    longest, vocab_size, length = engine.info.max_context, engine.info.vocab_size, len(prompt_ids)
    if length == 0:
        raise InputError("the prompt is empty", hint="give at least one token: this model has no token to begin with")
    unknown = next((token_id for token_id in prompt_ids if not 0 <= token_id < vocab_size), None)
    if unknown is not None:
        raise InputError(
            f"token {unknown} of the prompt is outside the model's vocabulary",
            hint=f"token ids are 0 to {vocab_size - 1}",
        )
    if limits.context is not None and limits.context > longest:
        raise InputError(
            f"a context of {limits.context} tokens is asked; the model has {longest}",
            hint=f"`--context` takes up to {longest}; left out, it is what prompt and answer need",
        )
    context = min(longest, limits.context or length + limits.max_tokens)
    if length >= context:
        longer = f", or raise `--context` (up to {longest})" if context < longest else ""
        raise InputError(
            f"the prompt is {counted(length, 'token')} and leaves no room in a context of {context}",
            hint=f"shorten the prompt{longer}",
        )
    return Room(context, min(limits.max_tokens, context - length))
