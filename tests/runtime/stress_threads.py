"""Sessions, threads and the thread pool under load; run by hand or by `make test-sanitize` on a library that looks for
data races. Without torch, whose threads such a library does not know.

    python -m tests.runtime.stress_threads [SECONDS]
"""

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dsv4c.errors import SessionError
from dsv4c.runtime.engine import Engine
from dsv4c.runtime.session import Sampling
from tests.runtime.hand_engine import CONTEXT, VOCAB, write_engine

TOKENS = [int(token) for token in np.random.default_rng(1).integers(0, VOCAB, CONTEXT)]


class Stress:
    """Threads that run until the time is over; the first error of any ends them all."""

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.errors: list[BaseException] = []
        self.rounds = 0

    def running(self) -> bool:
        return time.monotonic() < self.deadline and not self.errors

    def start(self, body: Callable[[], None]) -> threading.Thread:
        def loop() -> None:
            try:
                while self.running():
                    body()
                    self.rounds += 1
            except BaseException as error:  # noqa: BLE001 (raised in the main thread)
                self.errors.append(error)

        thread = threading.Thread(target=loop)
        thread.start()
        return thread


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    with tempfile.TemporaryDirectory() as folder:
        path = write_engine(Path(folder) / "hand.dsv4c")
        with Engine.open(path, threads=3) as engine:
            run(engine, path, seconds)


def run(engine: Engine, path: Path, seconds: float) -> None:
    stress = Stress(seconds)
    with engine.session() as session:
        expected = session.step(TOKENS[:40], [0] * 40, list(range(40)))
    shared = engine.session(slots=2)

    def own_session() -> None:
        with engine.session(slots=2) as session:
            logits = session.step(TOKENS[:40], [1] * 40, list(range(40)))
            assert (logits == expected).all()
            session.fork(1, 0)
            session.restore(1, session.save(0))
            session.sample([3], [0], [40], None, Sampling(temperature=1.0))

    def shared_session() -> None:
        try:
            at = shared.length(0)
            if at + 8 > CONTEXT:
                shared.reset(0)
            else:
                shared.step(TOKENS[at : at + 8], [0] * 8, list(range(at, at + 8)))
        except SessionError as error:
            # Another thread was inside, or has moved the slot on since.
            if "in use" not in error.message and "continues at position" not in error.message:
                raise

    def engine_calls() -> None:
        engine.verify_weights()
        assert engine.manifest() and engine.tokenizer_files()
        with Engine.open(path, threads=2) as other, other.session() as session:
            assert (session.step(TOKENS[:8], [0] * 8, list(range(8))) == expected[:8]).all()

    bodies = [own_session, own_session, own_session, shared_session, shared_session, engine_calls]
    threads = [stress.start(body) for body in bodies]
    for thread in threads:
        thread.join()
    if stress.errors:
        raise stress.errors[0]
    print(f"{stress.rounds} rounds in {len(threads)} threads")


if __name__ == "__main__":
    main()
