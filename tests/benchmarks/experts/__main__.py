"""Routed experts on a Hopper card: are they right, and how near do they come to the bandwidth of its memory.

    python -m tests.benchmarks.experts compile FOLDER      where the h100 extra is installed; needs no GPU
    python -m tests.benchmarks.experts run FOLDER          on the card, with torch, numpy and these files alone

`run` writes CSV rows as it goes and short tables last.
"""

import argparse
import sys
from pathlib import Path

from tests.benchmarks.experts import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    compile_step = steps.add_parser("compile")
    run_step = steps.add_parser("run")
    for step in (compile_step, run_step):
        step.add_argument("folder", type=Path)
    _add_compile_options(compile_step)
    run.add_options(run_step)
    options = parser.parse_args()
    return _compile(options) if options.step == "compile" else run.run(options)


def _add_compile_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", nargs="+", default=["flash"], choices=["flash", "pro"])
    parser.add_argument("--formats", nargs="+", default=["fp4", "fp8"], choices=["fp4", "fp8"])
    parser.add_argument("--topology", nargs="+", default=["striped"], choices=["striped", "pinned", "traced"])
    parser.add_argument("--buckets", nargs="+", type=int, help="default: 1 to 4096")
    parser.add_argument("--sm-count", type=int, default=132)
    parser.add_argument("--group-sms", type=int, default=4)
    parser.add_argument("--floor", action="store_true", help="also with the arithmetic left out, to time the stream")
    parser.add_argument(
        "--stream-rows",
        type=int,
        default=0,
        metavar="ROWS",
        help="buckets of up to so many rows also with experts_stream, where the build chooses another kernel",
    )
    parser.add_argument("--several", action="store_true", help="also the launches that are replaced, to compare with")
    parser.add_argument(
        "--change",
        action="append",
        default=[],
        metavar="LABEL:NAME=VALUE,...",
        help="also with other macros of the experts' kernel (shared_bytes and block change the launch)",
    )


def _compile(options: argparse.Namespace) -> int:
    # The card's machine has none of what it imports.
    from tests.benchmarks.experts.cross_compile import compile_variants, parse_change
    from tests.benchmarks.experts.planned_calls import BUCKETS, Choice

    choice = Choice(
        options.shape,
        options.formats,
        options.topology,
        options.buckets or BUCKETS,
        options.sm_count,
        options.group_sms,
        options.floor,
        options.several,
        [parse_change(text) for text in options.change],
        options.stream_rows,
    )
    return int(compile_variants(options.folder, choice) > 0)


if __name__ == "__main__":
    sys.exit(main())
