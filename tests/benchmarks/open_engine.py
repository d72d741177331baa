"""How long opening an engine takes, as CSV rows on stdout; weights are made up, so that no checkpoint is needed.

python -m tests.benchmarks.open_engine [--gigabytes 1,4] [--repeats 5] [ENGINE ...]

Without ENGINE an engine of that size is written to a temporary folder, whose weights are zeros. `cold` is
the first opening after the file's pages were dropped from memory, `warm` the median of the rest; milliseconds.
"""

import argparse
import csv
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dsv4c.runtime.engine import Engine
from tests.benchmarks.tokens_per_second import commit, device
from tests.runtime.test_opening import write_big_engine


@dataclass(frozen=True)
class Row:
    commit: str
    device: str
    size_bytes: int
    cold_ms: float
    warm_ms: float


def open_once(path: Path) -> float:
    """Milliseconds until a session could be made."""
    started = time.perf_counter()
    with Engine.open(path, threads=1):
        return (time.perf_counter() - started) * 1e3


def drop_pages(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(path: Path, repeats: int) -> Row:
    drop_pages(path)
    cold = open_once(path)
    warm = statistics.median(open_once(path) for _ in range(repeats))
    return Row(commit(), device(1), path.stat().st_size, round(cold, 3), round(warm, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description="time of opening an engine, as CSV")
    parser.add_argument("engine", type=Path, nargs="*")
    parser.add_argument("--gigabytes", default="1", help="sizes, separated by commas")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    writer = csv.DictWriter(sys.stdout, [field.name for field in fields(Row)])
    writer.writeheader()
    for path in arguments.engine:
        writer.writerow(asdict(measure(path, arguments.repeats)))
    if arguments.engine:
        return
    with tempfile.TemporaryDirectory() as folder:
        open_once(write_big_engine(Path(folder) / "first.dsv4c", 1 << 20))  # loads the library
        for gigabytes in map(float, arguments.gigabytes.split(",")):
            path = write_big_engine(Path(folder) / "big.dsv4c", int(gigabytes * 1e9))
            writer.writerow(asdict(measure(path, arguments.repeats)))


if __name__ == "__main__":
    main()
