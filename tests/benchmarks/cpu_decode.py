"""How fast the cpu target decodes, as CSV rows on stdout, all of one run on one machine.

python -m tests.benchmarks.cpu_decode [--threads N] [--layers L] [--formats bf16,int8,fp8,fp4,int4] [--skip small,wide]

- `small` rows: tokens/s of the trained tests/data/tiny-v4-official, prefill and decode, beside transformers on the same
  weights (dequantised, fp32, cached decode) with as many threads; `ratio` is ours over theirs.
- `wide` rows: a synthetic checkpoint of 20 M parameters a layer, built once per format, one slot. gb_per_s is the
  engine's weights (without the embedding table) over the time of a decode step; read_gb_per_s is a plain sum over as
  many bytes by as many threads; `ratio` is the share of it. cached_gb_per_s is the same kernel on weights that stay in
  a core's cache, times the threads: what its instructions allow if memory were free.

Speeds are those of the fastest repetition, and what is compared is repeated in turns. A whole step of the wide model
takes longer than a busy or throttled machine leaves it alone, so there the fastest run of every launch counts, and of
every part of the sum, which is cut into one part per layer; tokens_per_s is of the step put together of those launches.

Instructions: with AVX-512 the loop over a chunk of 32 weights of one row takes, besides prefetching and an eighth of
the loads of x
  bf16   6 for 64 bytes: 2 widening loads, 2 shifts, 2 multiply-adds                             0.09 a byte
  int8   8 for 32 bytes: 2 widening loads, 2 conversions, 2 scalings, 2 multiply-adds            0.25 a byte
  fp8    9 for 32 bytes: 1 widening load, shift, mask, 1 extract, 2 conversions from half (two
           operations each), 2 scalings, 2 multiply-adds                                         0.31 a byte
  fp4    6 for 16 bytes: 1 widening load, 1 shift, 2 table look-ups, 2 multiply-adds, and 1 to
  int4     scale the table of a group                                                            0.44 a byte
AVX2 takes twice as many for bf16, int8 and fp8 and three times as many for the packed formats.
"""

import argparse
import csv
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsv4c.compiler import build_engine
from dsv4c.recipe import Recipe, WeightsRecipe
from dsv4c.runtime.engine import Engine
from dsv4c.runtime.session import Sampling, Session
from dsv4c.target import find_target
from tests.benchmarks.tokens_per_second import commit, device
from tests.benchmarks.wide_checkpoint import WIDE, write_wide_checkpoint
from tests.fixtures import DATA, read_weights, transformers_model
from tests.runtime.kernel_runner import kernel_call
from tests.runtime.test_simd_kernels import random_weight

GREEDY = Sampling()
PROMPT = 256
DECODE_STEPS = 16
ROUNDS = 3
FORMATS = {
    "bf16": WeightsRecipe(),
    "int8": WeightsRecipe(experts="int8", dense="int8", experts_group=128),
    "fp8": WeightsRecipe(experts="fp8", dense="fp8"),
    "fp4": WeightsRecipe(experts="fp4", dense="fp8"),
    "int4": WeightsRecipe(experts="int4", dense="int4"),
}
# The format of the experts, which are nearly all of the wide engine, as the kernel tests call it.
EXPERTS = {"bf16": "bf16", "int8": "int8-128", "fp8": "fp8-128x128", "fp4": "fp4", "int4": "int4-32"}
WIDE_STEPS = 40
CACHED_BYTES = 256 << 10
CACHED_CALLS = 300


@dataclass(frozen=True)
class Row:
    commit: str
    device: str
    threads: int
    model: str
    format: str
    what: str
    tokens_per_s: float
    ratio: float
    whole_ratio: float | None = None  # as ratio, of the fastest whole step and the fastest whole reading
    weights_gb: float | None = None
    gb_per_s: float | None = None
    read_gb_per_s: float | None = None
    cached_gb_per_s: float | None = None


def fastest(run: Callable[[], None], repetitions: int) -> float:
    """Seconds."""
    best = float("inf")
    for _ in range(repetitions):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def prompt_of(vocab_size: int) -> list[int]:
    return [(7 * index + 3) % vocab_size for index in range(PROMPT)]


class OurRun:
    """Greedy decoding after a prompt in slot 0."""

    def __init__(self, session: Session, vocab_size: int) -> None:
        self.session, self.prompt, self.following = session, prompt_of(vocab_size), 0

    def _sample(self, token_ids: list[int], position: int) -> None:
        positions = list(range(position, position + len(token_ids)))
        slots = [0] * len(token_ids)
        self.following = int(self.session.sample(token_ids, slots, positions, [len(token_ids) - 1], GREEDY)[0])

    def prefill(self) -> None:
        self.session.reset(0)
        self._sample(self.prompt, 0)

    def step(self) -> None:
        self._sample([self.following], self.session.length(0))


class TheirRun:
    """The same with transformers."""

    def __init__(self, model: Any, vocab_size: int) -> None:
        self.model, self.prompt = model, torch.tensor([prompt_of(vocab_size)])
        self.cache: Any = None
        self.following = torch.zeros(1, 1, dtype=torch.long)

    @torch.no_grad()
    def _forward(self, token_ids: torch.Tensor) -> None:
        output = self.model(token_ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = output.past_key_values
        self.following = output.logits[:, -1:].argmax(-1)

    def prefill(self) -> None:
        self.cache = None
        self._forward(self.prompt)

    def step(self) -> None:
        self._forward(self.following)


def speeds(run: OurRun | TheirRun) -> tuple[float, float]:
    """Tokens per second of prefill and of decode."""
    seconds = fastest(run.prefill, 1)
    return PROMPT / seconds, DECODE_STEPS / sum(fastest(run.step, 1) for _ in range(DECODE_STEPS))


def small_rows(base: Row, folder: Path) -> list[Row]:
    checkpoint = DATA / "tiny-v4-official"
    engine_path = folder / "small.dsv4c"
    build_engine(checkpoint, Recipe(find_target("cpu")), engine_path, goldens=False)
    config_json = read_config(checkpoint)
    theirs = TheirRun(transformers_model(config_json, read_weights(checkpoint)), config_json["vocab_size"])
    torch.set_num_threads(base.threads)
    with Engine.open(engine_path, threads=base.threads) as engine:
        ours = OurRun(engine.session(slots=1, context=PROMPT + DECODE_STEPS), engine.info.vocab_size)
        rounds = [(speeds(ours), speeds(theirs)) for _ in range(ROUNDS)]
    rows = []
    for index, what in enumerate(("prefill", "decode")):
        mine, other = (max(pair[side][index] for pair in rounds) for side in (0, 1))
        rows.append(replace(base, model="small", format="fp8+fp4", what=what, tokens_per_s=mine, ratio=mine / other))
        rows.append(replace(base, model="small", format="fp32", what=f"{what} (transformers)", tokens_per_s=other))
    return rows


def read_config(checkpoint: Path) -> dict[str, Any]:
    config_json: dict[str, Any] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return config_json


class Reader:
    """A sum over so many bytes, shared among threads; keeps the fastest reading of every part."""

    def __init__(self, size_bytes: int, parts: int, threads: int) -> None:
        values = np.ones(size_bytes // 8, dtype=np.int64)
        self._parts = [np.array_split(part, threads) for part in np.array_split(values, parts)]
        self._pool = ThreadPoolExecutor(threads)
        self._fastest = [float("inf")] * len(self._parts)
        self.whole_seconds = float("inf")

    def read(self) -> None:
        begun = time.perf_counter()
        for index, part in enumerate(self._parts):
            started = time.perf_counter()
            for _ in self._pool.map(np.sum, part):
                pass
            self._fastest[index] = min(self._fastest[index], time.perf_counter() - started)
        self.whole_seconds = min(self.whole_seconds, time.perf_counter() - begun)

    def seconds(self) -> float:
        return sum(self._fastest)


class Stepper:
    """Decode steps of one token in slot 0; keeps the fastest run of every launch, and the fastest whole step."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._fastest: dict[int, float] = {}
        self.whole_seconds = float("inf")

    def step(self) -> None:
        begun = time.perf_counter()
        self._session.step([3], [0], [self._session.length(0)])
        self.whole_seconds = min(self.whole_seconds, time.perf_counter() - begun)
        for launch in self._session.profile([3], [0], [self._session.length(0)]):
            self._fastest[launch.launch] = min(self._fastest.get(launch.launch, float("inf")), launch.seconds)

    def seconds(self) -> float:
        return sum(self._fastest.values())


def cached_gb_per_s(storage: str) -> float:
    """Of one core and the kernel of a weight format, on a weight that stays in its cache."""
    inputs = WIDE["hidden_size"]
    one_row = sum(t.nbytes for t in random_weight(128, inputs, storage)[:2] if t is not None) // 128
    weight = random_weight(CACHED_BYTES // one_row // 8 * 8, inputs, storage)
    call = kernel_call("linear", torch.randn(1, inputs), *weight, torch.float32, threads=1)
    size_bytes = sum(t.nbytes for t in weight[:2] if t is not None)
    return size_bytes / fastest(call, CACHED_CALLS) / 1e9


def wide_row(base: Row, checkpoint: Path, folder: Path, name: str) -> Row:
    engine_path = folder / f"{name}.dsv4c"
    recipe = Recipe(find_target("cpu"), weights=FORMATS[name], decode_buckets=(1,), mixed_buckets=(32,))
    build_engine(checkpoint, recipe, engine_path, goldens=False, check_values=False)
    with Engine.open(engine_path, threads=base.threads) as engine:
        embedding_bytes = 2 * engine.info.vocab_size * engine.info.hidden_size
        size_bytes = engine.info.weight_bytes - embedding_bytes
        reader, stepper = (
            Reader(size_bytes, engine.info.layer_count, base.threads),
            Stepper(engine.session(slots=1, context=2 * WIDE_STEPS)),
        )
        for _ in range(WIDE_STEPS):
            stepper.step()
            reader.read()
    engine_path.unlink()
    step, reading = stepper.seconds(), reader.seconds()
    return replace(
        base,
        model="wide",
        format=name,
        what="decode",
        tokens_per_s=1 / step,
        ratio=reading / step,
        whole_ratio=reader.whole_seconds / stepper.whole_seconds,
        weights_gb=size_bytes / 1e9,
        gb_per_s=size_bytes / step / 1e9,
        read_gb_per_s=size_bytes / reading / 1e9,
        cached_gb_per_s=base.threads * cached_gb_per_s(EXPERTS[name]),
    )


def _names(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description="decode speed of the cpu target, as CSV")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=48, help="of the wide checkpoint")
    parser.add_argument("--formats", type=_names, default=list(FORMATS))
    parser.add_argument("--skip", type=_names, default=[])
    arguments = parser.parse_args()
    writer = csv.writer(sys.stdout)
    writer.writerow(field.name for field in fields(Row))

    def write(row: Row) -> None:
        values = asdict(row).values()
        writer.writerow("" if v is None else round(v, 3) if isinstance(v, float) else v for v in values)
        sys.stdout.flush()

    base = Row(commit(), device(arguments.threads), arguments.threads, "", "", "", 0.0, 1.0)
    folder = Path(tempfile.mkdtemp(prefix="dsv4c-bench-"))
    try:
        if "small" not in arguments.skip:
            for row in small_rows(base, folder):
                write(row)
        if "wide" not in arguments.skip:
            checkpoint = write_wide_checkpoint(folder / "wide", arguments.layers)
            for name in arguments.formats:
                write(wide_row(base, checkpoint, folder, name))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
