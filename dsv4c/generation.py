"""`dsv4c run` without the terminal: prompt token ids in, text or ids out piece by piece, with timings."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from dsv4c.errors import InputError
from dsv4c.runtime.engine import Engine, Sampling
from dsv4c.text import IncrementalDecoder, StopStrings, Tokenizer

# eos: an end token; stop: a stop string; max_tokens, context: the limit that was reached.
StopReason = Literal["eos", "stop", "max_tokens", "context"]


@dataclass(frozen=True)
class GenerationLimits:
    """`context` is the number of positions to make room for; None: what prompt and `max_tokens` need."""

    max_tokens: int
    context: int | None = None


@dataclass(frozen=True)
class GenerationResult:
    """`prefill_seconds` runs from the prompt to the first token, `decode_seconds` over the tokens after it."""

    text: str
    token_ids: list[int]  # as sampled, the end token included
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
        return (
            f"prompt {self.prompt_tokens} tokens, prefill {self.prefill_tokens_per_second:.1f} tokens/s; "
            f"generated {len(self.token_ids)} tokens, decode {self.decode_tokens_per_second:.1f} tokens/s; "
            f"stopped by {self.stop_reason}"
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
) -> GenerationResult:
    """Continues `prompt_ids`, passing every printable piece of the answer to `emit` as soon as it is known."""
    context = _context(engine, len(prompt_ids), limits)
    max_tokens = min(limits.max_tokens, context - len(prompt_ids))
    reason: StopReason = "max_tokens" if max_tokens == limits.max_tokens else "context"
    token_ids: list[int] = []
    pieces: list[str] = []

    def put(text: str) -> None:
        if text:
            pieces.append(text)
            emit(text)

    started = first = last = time.perf_counter()
    # No stop ids: the end token is handled here, where it is told from the limits.
    for token_id in engine.generate(
        prompt_ids, max_new_tokens=max_tokens, sampling=sampling, stop_ids=(), context=context
    ):
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
    return GenerationResult(
        text="".join(pieces),
        token_ids=token_ids,
        stop_reason=reason,
        prompt_tokens=len(prompt_ids),
        prefill_seconds=first - started,
        decode_seconds=last - first,
    )


def _context(engine: Engine, prompt_tokens: int, limits: GenerationLimits) -> int:
    """Positions of the session. Room for no more than is asked: state grows with it."""
    longest = engine.info.max_context
    if prompt_tokens == 0:
        raise InputError("the prompt is empty", hint="give at least one token: this model has no token to begin with")
    if limits.context is not None and limits.context > longest:
        raise InputError(f"a context of {limits.context} tokens is asked; the model has {longest}")
    context = min(longest, limits.context or prompt_tokens + limits.max_tokens)
    if prompt_tokens >= context:
        raise InputError(
            f"the prompt is {prompt_tokens} tokens and leaves no room in a context of {context}",
            hint=f"shorten the prompt, or raise `--context` (up to {longest})",
        )
    return context
