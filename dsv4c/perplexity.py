"""`dsv4c bench --perplexity`: how well an engine predicts documents.

The protocol is that of the figures in the README: all documents in one stream, each between the begin and the end
token; rows of 512 inputs, each with its next token as the target, one row after the other; the tail is dropped. A row
is a sequence of its own, and attention runs across the borders of documents.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dsv4c.errors import InputError
from dsv4c.runtime.engine import Engine
from dsv4c.runtime.session import EngineInfo, Session
from dsv4c.text import Tokenizer

ROW_TOKENS = 512
# Sequences of one step: they share the reading of the weights, and the logits of a step stay small.
_SLOTS = 4
_CHUNK_TOKENS = 64

Progress = Callable[[str, int, int], None]
TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Perplexity:
    """`row_nll`: the negative log likelihood of every row's targets, in nats."""

    row_nll: tuple[float, ...]
    row_tokens: int = ROW_TOKENS

    @property
    def tokens(self) -> int:
        return len(self.row_nll) * self.row_tokens

    @property
    def nll(self) -> float:
        """Nats per token."""
        return math.fsum(self.row_nll) / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)

    def to_dict(self) -> dict[str, object]:
        return {
            "rows": len(self.row_nll),
            "row_tokens": self.row_tokens,
            "tokens": self.tokens,
            "nll": self.nll,
            "perplexity": self.perplexity,
        }

    def to_text(self) -> str:
        return (
            f"rows        {len(self.row_nll):,} of {self.row_tokens} tokens\n"
            f"tokens      {self.tokens:,}\n"
            f"nll         {self.nll:.7f}\n"
            f"perplexity  {self.perplexity:.5f}"
        )


def read_texts(path: Path) -> list[str]:
    """The `text` of every line of a JSON lines file. Raises InputError, which names the line, where there is none."""
    texts = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError(
                f"{path}, line {number} is not JSON: {error}", hint='give one {"text": "..."} a line'
            ) from None
        text = document.get("text") if isinstance(document, dict) else None
        if not isinstance(text, str):
            raise InputError(f"{path}, line {number} has no `text`", hint='give one {"text": "..."} a line')
        texts.append(text)
    return texts


def token_rows(texts: Iterable[str], tokenizer: Tokenizer, info: EngineInfo, row_tokens: int = ROW_TOKENS) -> TokenIds:
    """Inputs and targets: int32 [rows, row_tokens + 1], the last token of a row being the first of the next."""
    if info.bos_token_id is None or not info.eos_token_ids:
        raise InputError(
            "the engine's model has no begin or no end token, between which the documents go",
            hint="build from a checkpoint whose config.json has `bos_token_id` and `eos_token_id`",
        )
    stream: list[int] = []
    for text in texts:
        stream += [info.bos_token_id, *tokenizer.encode(text), info.eos_token_ids[0]]
    rows = max(len(stream) - 1, 0) // row_tokens
    if rows == 0:
        raise InputError(f"the documents make {len(stream)} tokens; a row takes {row_tokens + 1}")
    ids = np.array(stream[: rows * row_tokens + 1], np.int32)
    return np.lib.stride_tricks.sliding_window_view(ids, row_tokens + 1)[::row_tokens]


def measure_perplexity(engine: Engine, rows: TokenIds, progress: Progress | None = None) -> Perplexity:
    """The perplexity of `rows` (see `token_rows`)."""
    session = engine.session(slots=min(_SLOTS, len(rows)), context=rows.shape[1] - 1)
    found: list[float] = []
    for first in range(0, len(rows), session.slots):
        batch = rows[first : first + session.slots]
        found += _batch_nll(session, batch)
        if progress is not None:
            progress("perplexity", len(found), len(rows))
    return Perplexity(tuple(found), rows.shape[1] - 1)


def _batch_nll(session: Session, rows: TokenIds) -> list[float]:
    """One row a slot, all slots in each step."""
    count, length = rows.shape[0], rows.shape[1] - 1
    total = np.zeros(count)
    for slot in range(count):
        session.reset(slot)
    for start, end in _chunks(length):
        width = end - start
        slots = np.repeat(np.arange(count), width)
        positions = np.tile(np.arange(start, end), count)
        logits = session.step(rows[:, start:end].reshape(-1), slots, positions)
        targets = rows[:, start + 1 : end + 1].reshape(-1)
        total += negative_log_likelihood(logits, targets).reshape(count, width).sum(axis=1)
    return [float(value) for value in total]


def _chunks(length: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _CHUNK_TOKENS, length)) for start in range(0, length, _CHUNK_TOKENS))


def negative_log_likelihood(logits: npt.NDArray[np.float32], targets: TokenIds) -> npt.NDArray[np.float64]:
    """-log softmax of each row at its target, in nats."""
    largest = logits.max(axis=1, keepdims=True)
    chosen = (logits[np.arange(len(targets)), targets] - largest[:, 0]).astype(np.float64)
    # In place: a copy of the logits is what the exponentials need anyway.
    shifted = np.subtract(logits, largest)
    np.exp(shifted, out=shifted)
    nll: npt.NDArray[np.float64] = np.log(shifted.sum(axis=1, dtype=np.float64)) - chosen
    return nll
