"""The measurement on the card: which variants, in which order."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from tests.benchmarks.experts import check, peers, resident, timing
from tests.benchmarks.experts.manifest import Manifest, Variant, read_manifest
from tests.benchmarks.experts.program import Layer
from tests.benchmarks.experts.records import random_records
from tests.benchmarks.experts.routing import random_bias
from tests.benchmarks.experts.rows import Output, Reporter
from tests.benchmarks.experts.tables import print_tables
from tests.benchmarks.experts.workers import Item, Job, run_job

CHECK_TOKENS = (0, 1, 2, 3, 8, 17, 64, 128, 200, 1024, 4096)
SKEW_TOKENS = (8, 64, 128, 1024)
REPEAT_TOKENS = (1, 8, 32, 128, 256, 1024, 4096)
TIME_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PEER_TOKENS = (1, 8, 64, 128, 1024, 4096)
RESIDENT_TOKENS = (1, 8, 64)
MEASUREMENTS = ("check", "skew", "repeat", "time", "peers", "resident")


def run(options: argparse.Namespace) -> int:
    manifest = read_manifest(options.folder)
    output = Output()
    for job in _jobs(manifest, options):
        run_job(job, output)
    print_tables(output.rows, manifest)
    return int(any(_failed(row) for row in output.rows))


def _failed(row: dict[str, object]) -> bool:
    return row["kind"] == "error" or (row["kind"] in ("check", "repeat") and row.get("note") != "ok")


def _jobs(manifest: Manifest, options: argparse.Namespace) -> Iterator[Job]:
    chosen = [name for name in MEASUREMENTS if getattr(options, name)] or MEASUREMENTS
    for shape in options.shape:
        for weights in options.formats:
            own = [
                variant
                for variant in manifest.variants
                if (variant.shape, variant.weights) == (shape, weights)
                and variant.topology in options.topology
                and (not options.only or any(text in variant.name for text in options.only))
            ]
            for name in chosen:
                items = list(_ITEMS[name](own, options))
                if items:
                    prepare = _preparation(manifest, options, own[0], with_bandwidth=name == "time")
                    yield Job(f"{shape} {weights}: {name}", prepare, items)


def _preparation(
    manifest: Manifest, options: argparse.Namespace, variant: Variant, with_bandwidth: bool
) -> Callable[[Reporter], Layer]:
    def prepare(report: Reporter) -> Layer:
        read = 0.0
        if with_bandwidth:
            found = timing.read_bandwidths(options.folder, manifest.tools)
            for name, value in found.items():
                report.row("ceiling", case=f"read bandwidth, {name}", note=f"{value / 1e9:.0f} GB/s")
            read = max(found.values())
            torch.cuda.empty_cache()
        shape = manifest.shape(variant.shape)
        records = random_records(shape, variant.weights, variant.record_bytes)
        return Layer(options.folder, shape, records, random_bias(shape.experts), read)

    return prepare


def _check_items(variants: list[Variant], options: argparse.Namespace) -> Iterator[Item]:
    yield from _checks(variants, options.tokens or CHECK_TOKENS, ["uniform"])


def _skew_items(variants: list[Variant], options: argparse.Namespace) -> Iterator[Item]:
    routed = [variant for variant in variants if variant.routing != "hash"]
    yield from _checks(routed, options.tokens or SKEW_TOKENS, ["same experts", "hot expert"])


def _checks(variants: list[Variant], wanted: Sequence[int], cases: Sequence[str]) -> Iterator[Item]:
    for tokens in wanted:
        for variant in _fitting(variants, tokens):
            if variant.has_results:
                for case in cases:
                    work = partial(check.check_variant, variant=variant, tokens=tokens, case=case)
                    yield Item(f"{variant.name}, T={tokens}, {case}", work)


def _repeat_items(variants: list[Variant], options: argparse.Namespace) -> Iterator[Item]:
    for tokens in options.tokens or REPEAT_TOKENS:
        for variant in _fitting(variants, tokens):
            if variant.has_results and variant.routing != "hash":
                work = partial(check.check_repeats, variant=variant, tokens=tokens, repeats=options.repeats)
                yield Item(f"{variant.name}, T={tokens}", work)


def _time_items(variants: list[Variant], options: argparse.Namespace) -> Iterator[Item]:
    for tokens in options.tokens or TIME_TOKENS:
        own = [variant for variant in _fitting(variants, tokens) if variant.routing != "hash"]
        for case in options.cases if own else ():
            work = partial(timing.time_tokens, variants=own, tokens=tokens, case=case, rounds=options.rounds)
            yield Item(f"T={tokens}, {case}", work)


def _peer_items(variants: list[Variant], options: argparse.Namespace) -> Iterator[Item]:
    # They do not depend on the format of these weights; bf16 ones of the larger shape would fill the card.
    if variants and variants[0].weights == options.formats[0] and variants[0].shape == "flash":
        yield Item("what is there", peers.report_missing)
        for tokens in options.tokens or PEER_TOKENS:
            yield Item(f"T={tokens}", partial(peers.time_peers, tokens=tokens))


def _resident_items(variants: list[Variant], options: argparse.Namespace) -> Iterator[Item]:
    if variants and variants[0].weights == options.formats[0]:
        for tokens in options.tokens or RESIDENT_TOKENS:
            for variant in _fitting(variants, tokens):
                if variant.kind == "product" and variant.topology == "striped" and variant.routing == "topk":
                    work = partial(resident.time_resident, variant=variant, tokens=tokens)
                    yield Item(f"{variant.name}, T={tokens}", work)


_ITEMS = {
    "check": _check_items,
    "skew": _skew_items,
    "repeat": _repeat_items,
    "time": _time_items,
    "peers": _peer_items,
    "resident": _resident_items,
}


def _fitting(variants: Iterable[Variant], tokens: int) -> list[Variant]:
    """Of every series of variants, that of the smallest bucket."""
    best: dict[tuple[str, str, str], Variant] = {}
    for variant in variants:
        key = variant.topology, variant.routing, variant.kind
        # A bucket of one row always has one.
        if variant.bucket >= (tokens or 2) and (key not in best or variant.bucket < best[key].bucket):
            best[key] = variant
    return [found for found in best.values() if not found.of_few_buckets or found.bucket <= 2 * tokens]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", nargs="+", type=int, help="instead of each measurement's own")
    parser.add_argument("--shape", nargs="+", default=["flash"], choices=["flash", "pro"])
    parser.add_argument("--formats", nargs="+", default=["fp4", "fp8"], choices=["fp4", "fp8"])
    parser.add_argument("--topology", nargs="+", default=["striped", "pinned", "traced"])
    parser.add_argument("--only", nargs="+", help="variants with one of these texts in their name")
    parser.add_argument("--cases", nargs="+", default=["uniform"], choices=list(check.CASES), help="that are timed")
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS, help="of timing, all variants in each")
    parser.add_argument("--repeats", type=int, default=100, help="runs that are compared bit by bit")
    parser.add_argument("--check", action="store_true", help="errors; without any of these, all are done")
    parser.add_argument("--skew", action="store_true", help="errors with skewed routing")
    parser.add_argument("--repeat", action="store_true", help="the same bits every time, beside other work too")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--peers", action="store_true", help="the same work by torch, vLLM and DeepGEMM")
    parser.add_argument("--resident", action="store_true", help="what the router's weights in L2 would gain")
