"""Worker processes: what one of them breaks or blocks does not stop the rest.

After an error of the card a process is of no use, and a launch that waits for ever blocks it. The items of a job run in
one process, one after the other; where it ends early, another one goes on behind the item that it was at.
"""

import json
import multiprocessing
import os
import selectors
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tests.benchmarks.experts.program import Layer
from tests.benchmarks.experts.rows import Output, Reporter

SILENCE_S = 45  # after which a worker counts as blocked
_MOST_FAILURES = 4  # of a job, which is then given up


@dataclass(frozen=True)
class Item:
    title: str
    work: Callable[[Reporter, Layer], None]


@dataclass(frozen=True)
class Job:
    """`prepare` makes on the card what all items use."""

    title: str
    prepare: Callable[[Reporter], Layer]
    items: Sequence[Item]


def run_job(job: Job, output: Output) -> None:
    started = time.perf_counter()
    begin, failures = 0, 0
    while begin < len(job.items):
        at, ended = _run_worker(job, begin, output)
        if ended is None:
            break
        failures += 1
        title = job.items[at].title if at >= 0 else "preparing"
        output.row({"kind": "error", "case": f"{job.title}: {title}", "note": ended})
        if at < 0 or failures == _MOST_FAILURES:
            output.row({"kind": "error", "case": job.title, "note": "given up"})
            break
        begin = at + 1
    output.row({"kind": "job", "case": job.title, "note": f"{time.perf_counter() - started:.1f} s"})


def _run_worker(job: Job, begin: int, output: Output) -> tuple[int, str | None]:
    """The item that it was at (-1: none yet), and why it ended there; None where it did all."""
    receiving, sending = os.pipe()
    # Forked, so that torch is loaded once: this process has not touched CUDA.
    process = multiprocessing.get_context("fork").Process(target=_work, args=(job, begin, sending))
    process.start()
    os.close(sending)
    at, ended, pending = -1, None, ""
    with selectors.DefaultSelector() as selector:
        selector.register(receiving, selectors.EVENT_READ)
        while True:
            if not selector.select(SILENCE_S):
                process.kill()
                ended = f"blocked: nothing for {SILENCE_S} s"
                break
            data = os.read(receiving, 1 << 16).decode()
            if not data:
                break
            *lines, pending = (pending + data).split("\n")
            for line in lines:
                message = json.loads(line)
                at = message.get("item", at)
                ended = message.get("failed", ended)
                if "kind" in message:
                    output.row(message)
    os.close(receiving)
    process.join()
    if ended is None and process.exitcode:
        ended = f"ended with status {process.exitcode}"
    return at, ended


def _work(job: Job, begin: int, sending: int) -> None:
    with os.fdopen(sending, "w") as to:
        report = Reporter(to)
        try:
            # Not the default stream, for which others wait.
            with torch.cuda.stream(torch.cuda.Stream()):
                layer = job.prepare(report)
                torch.cuda.synchronize()
                for index in range(begin, len(job.items)):
                    report.message(item=index)
                    job.items[index].work(report, layer)
                    torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  told, and another worker goes on
            traceback.print_exc()
            report.message(failed=f"{type(error).__name__}: {error}")
