"""Tokens per second of an engine, as CSV rows on stdout.

python -m tests.benchmarks.tokens_per_second ENGINE [--threads N] [--context N,N] [--batch N,N]

A row is one context and batch: the prompt of that many tokens is prefilled in every slot, then all slots decode
together. p50 and p99 are of one decode step, in milliseconds.
"""

import argparse
import csv
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dsv4c.runtime.engine import Engine
from dsv4c.runtime.session import Sampling, Session
from dsv4c.wording import counted

DECODE_STEPS = 64
GREEDY = Sampling()


@dataclass(frozen=True)
class Row:
    commit: str
    device: str
    recipe: str
    context: int
    batch: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    p50_ms: float
    p99_ms: float


def prefill(session: Session, context: int, batch: int, vocab_size: int) -> tuple[list[int], float]:
    """The next token of every slot, and tokens per second."""
    prompt = [(7 * index + 3) % vocab_size for index in range(context)]
    started = time.perf_counter()
    following = [
        int(session.sample(prompt, [slot] * context, list(range(context)), [context - 1], GREEDY)[0])
        for slot in range(batch)
    ]
    return following, batch * context / (time.perf_counter() - started)


def decode(session: Session, token_ids: list[int], context: int) -> list[float]:
    """Seconds of every step, all slots in one."""
    slots = list(range(len(token_ids)))
    seconds = []
    for step in range(DECODE_STEPS):
        started = time.perf_counter()
        sampled = session.sample(token_ids, slots, [context + step] * len(slots), slots, GREEDY)
        seconds.append(time.perf_counter() - started)
        token_ids = [int(token_id) for token_id in sampled]
    return seconds


def measure(engine: Engine, context: int, batch: int) -> Row:
    session = engine.session(slots=batch, context=context + DECODE_STEPS)
    token_ids, prefill_speed = prefill(session, context, batch, engine.info.vocab_size)
    seconds = decode(session, token_ids, context)
    percentiles = statistics.quantiles(seconds, n=100, method="inclusive")
    recipe = engine.manifest()["recipe"]
    return Row(
        commit=commit(),
        device=device(engine.info.threads),
        recipe=f"{recipe['target']}/{recipe['numerics']}",
        context=context,
        batch=batch,
        prefill_tokens_per_s=round(prefill_speed, 1),
        decode_tokens_per_s=round(batch * DECODE_STEPS / sum(seconds), 1),
        p50_ms=round(percentiles[49] * 1e3, 3),
        p99_ms=round(percentiles[98] * 1e3, 3),
    )


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return result.stdout.strip() or "unknown"


def device(threads: int) -> str:
    """The processor's name where Linux gives one, and how many of its cores the engine uses."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}; {counted(threads, 'core')}"


def _sizes(text: str) -> list[int]:
    sizes = [int(size) for size in text.split(",")]
    if min(sizes) < 1:
        raise ValueError
    return sizes


# argparse names it in its errors: "invalid list of sizes value".
_sizes.__name__ = "list of sizes"


def main() -> None:
    parser = argparse.ArgumentParser(description="tokens per second of an engine, as CSV")
    parser.add_argument("engine", type=Path, help="the engine file")
    parser.add_argument("--threads", type=int, help="CPU threads (default: one a processor)")
    parser.add_argument(
        "--context", type=_sizes, default=[64, 512], metavar="N,N", help="tokens of the prompt (default: 64,512)"
    )
    parser.add_argument(
        "--batch", type=_sizes, default=[1, 4], metavar="N,N", help="sequences decoded together (default: 1,4)"
    )
    arguments = parser.parse_args()
    writer = csv.DictWriter(sys.stdout, [field.name for field in fields(Row)])
    writer.writeheader()
    with Engine.open(arguments.engine, threads=arguments.threads) as engine:
        for context in arguments.context:
            for batch in arguments.batch:
                writer.writerow(asdict(measure(engine, context, batch)))


if __name__ == "__main__":
    main()
