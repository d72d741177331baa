"""A slice of V4-Flash on one Hopper card: 8 layers (kinds 0,0,4,128,4,128,4,128) at their real widths, full vocabulary.

    python -m tests.benchmarks.h100_slice compile FOLDER            where the h100 extra is installed; needs no GPU
    python -m tests.benchmarks.h100_slice fill FOLDER ENGINE        31 GB of generated weights, straight into the engine
    python -m tests.benchmarks.h100_slice run ENGINE                on the card; CSV on stdout

`run` prints what opening takes, then a row for every context and batch, then the launches of a step by operator.
With `torch` and CUDA installed it also measures the card's read bandwidth and its host-to-device rate, to which the
figures are compared.
"""

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dsv4c.engine.writer import EngineParts, write_engine
from dsv4c.runtime.engine import Engine
from dsv4c.runtime.session import Sampling, Session

LAYERS = (0, 0, 4, 128, 4, 128, 4, 128)
GREEDY = Sampling()
DECODE_STEPS = 50
# (context, slots) of the decode rows.
DECODE_CASES = ((1024, 1), (1024, 8), (1024, 32), (65536, 1))
PREFILL_TOKENS = 4096
SPEED_COLUMNS = (
    *("commit", "device", "recipe", "context", "batch"),
    *("prefill_tokens_per_s", "decode_tokens_per_s", "p50_ms", "p99_ms"),
)
PROFILE_COLUMNS = ("rows", "operator", "launches", "microseconds", "share_of_time", "gb_per_s", "tflop_per_s")
_POOL_BYTES = 64 << 20
# Codes of both kinds then have a standard deviation of about 1/64: inputs are 4096 wide.
_FP4_EXPONENT, _FP8_EXPONENT = -8, -6


def compile_slice(folder: Path) -> None:
    """Plan, kernels and the kinds of the weights' bytes, as files of a few MB."""
    # The compiler is not needed on the card.
    from dsv4c.cubin_cache import default_cache
    from dsv4c.engine.plan_section import encode_plan
    from dsv4c.graph.annotations import Constant
    from dsv4c.graph.builder import build_graph
    from dsv4c.kernel_section import compile_section
    from dsv4c.kernels.assign import assign_kernels
    from dsv4c.passes.pass_manager import PassContext, run_passes
    from dsv4c.passes.pipeline import build_pipeline
    from dsv4c.plan.expert_facts import expert_facts
    from dsv4c.plan.lowering import lower_graph
    from dsv4c.planning.source import open_source
    from dsv4c.recipe import Recipe
    from tests.header_only import RELEASED, write_config

    config = {**RELEASED["flash"], "num_hidden_layers": len(LAYERS), "compress_ratios": [*LAYERS, 0]}
    source = open_source(write_config(folder / "config", config))
    recipe = Recipe.for_target("h100", None)
    started = time.perf_counter()
    graph = build_graph(source.config, source.weights, recipe.numerics, recipe.rollback_rows)
    graph = run_passes(graph, build_pipeline(), PassContext(recipe.target, recipe, None))
    lowered = lower_graph(graph, recipe.decode_buckets, recipe.mixed_buckets, recipe.rollback_rows)
    plan = assign_kernels(lowered, recipe.target)
    planned = time.perf_counter()
    code = compile_section(plan, recipe.target, default_cache(), progress=_progress)
    compiled = time.perf_counter()
    (folder / "plan.bin").write_bytes(encode_plan(plan, code.images))
    (folder / "kernels.bin").write_bytes(code.data)
    extents = []
    for extent in plan.weights.extents:
        what = extent.what
        if isinstance(what, Constant):
            kind = f"constant.{str(what.dtype).removeprefix('torch.')}"
            extents.append([extent.offset, extent.size_bytes, kind, list(what.values)])
        else:
            kind = f"{what.stored_as.value}.{what.part}"
            extents.append([extent.offset, extent.size_bytes, kind, extent.source.rsplit(".", 1)[-1]])
    manifest = {
        "target": recipe.target.name,
        "arch": recipe.target.arch,
        "recipe": recipe.to_dict(),
        "machine_code": code.facts,
        "experts": expert_facts(plan, recipe),
    }
    facts = {
        "manifest": manifest,
        "weight_bytes": plan.weights.size_bytes,
        "experts": source.config.n_routed_experts,
        "extents": extents,
    }
    (folder / "slice.json").write_text(json.dumps(facts))
    largest = max(plan.buckets, key=lambda bucket: bucket.tokens)
    print(f"planned in {planned - started:.1f} s, {len(code.images)} kernels compiled in {compiled - planned:.1f} s")
    print(f"{len(largest.launches)} launches, {sum(len(la.calls) for la in largest.launches)} kernel calls a step")
    print("\n".join(code.warnings))


def _progress(done: int, total: int) -> None:
    print(f"\r{done}/{total} kernels", end="" if done < total else "\n", file=sys.stderr, flush=True)


def fill_slice(folder: Path, engine: Path) -> None:
    """The engine, with weights that are random but sane: every matrix keeps the scale of its input."""
    facts = json.loads((folder / "slice.json").read_text())
    parts = EngineParts(
        arch=facts["manifest"]["arch"],
        manifest=facts["manifest"],
        plan=(folder / "plan.bin").read_bytes(),
        tokenizer_files={},
        goldens=None,
        weight_bytes=facts["weight_bytes"],
        kernels=(folder / "kernels.bin").read_bytes(),
    )
    blocks = generated_weights(facts["extents"], facts["weight_bytes"], facts["experts"])
    write_engine(engine, parts, blocks)


def generated_weights(extents: list[list[Any]], total: int, experts: int) -> Iterator[memoryview]:
    """The WEIGHTS bytes in order, from a pool of random bytes read at random places."""
    rng = np.random.default_rng(1)
    pool = rng.integers(0, 256, _POOL_BYTES, np.uint8)
    pools = {
        "fp4": pool,
        # Magnitudes of 0.5 to 1.875, either sign.
        "fp8": pool & 0x8F | 0x30,
        "bf16": _bf16(rng.standard_normal(_POOL_BYTES // 2).astype(np.float32) / 64),
    }
    written = 0
    for offset, size, kind, detail in extents:
        if offset > written:
            yield memoryview(bytes(offset - written))
        yield memoryview(_extent(rng, pools, size, kind, detail, experts)).cast("B")
        written = offset + size
    if written < total:
        yield memoryview(bytes(total - written))


def _extent(rng: np.random.Generator, pools: dict[str, Any], size: int, kind: str, detail: Any, experts: int) -> Any:
    encoding, _, part = kind.partition(".")
    if encoding == "constant":
        return np.array(detail, part)
    if part == "scales":
        return np.full(size, 127 + (_FP4_EXPONENT if encoding.startswith("fp4") else _FP8_EXPONENT), np.uint8)
    if encoding == "int64":
        return rng.integers(0, experts, size // 8, np.int64)
    if encoding == "f32":
        return (rng.standard_normal(size // 4) / 64).astype(np.float32)
    if encoding == "bf16" and size <= 1 << 16:  # norms
        return _bf16((1 + rng.standard_normal(size // 2) / 16).astype(np.float32))
    name = next(name for name in ("fp4", "fp8", "bf16") if encoding.startswith(name))
    source = pools[name]
    start = int(rng.integers(0, 1 << 20)) * 2
    repeats = -(-(start + size) // len(source))
    found = np.concatenate([source] * repeats)[start : start + size] if repeats > 1 else source[start : start + size]
    return _with_scales(encoding, found.copy()) if part == "packed" else found


def _with_scales(encoding: str, record: Any) -> Any:
    """A packed expert (dsv4c/checkpoint/expert_packing.py), whose scales lie among its codes."""
    if encoding.startswith("fp4"):
        record.reshape(-1, 1088)[:, 1024:] = 127 + _FP4_EXPONENT
    else:
        scales = np.array([2.0**_FP8_EXPONENT] * 2 + [0, 0], np.float32)
        record.reshape(-1, 4 * 2048 + 16)[:, 4 * 2048 :] = scales.view(np.uint8)
    return record


def _bf16(values: Any) -> Any:
    """Truncated, which is near enough for random numbers; as bytes."""
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def run_slice(path: Path, profile: bool) -> None:
    ceilings = measure_ceilings()
    out = csv.writer(sys.stdout)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    started = time.perf_counter()
    engine = Engine.open(path)
    opened = time.perf_counter() - started
    device = engine.info.device
    load = engine.info.weight_seconds
    rate = engine.info.weight_bytes / load if load else 0.0
    session = engine.session(1, 2048)
    started = time.perf_counter()
    token = int(session.sample([0], [0], [0], [0], GREEDY)[0])
    first = time.perf_counter() - started
    session.close()
    out.writerow(["measure", "value", "unit"])
    out.writerow(["open, weights included", round(opened, 3), "s"])
    out.writerow(["open, weights excluded", round(opened - load, 3), "s"])
    out.writerow(["weights", round(rate / 1e9, 2), "GB/s"])
    out.writerow(["pinned host to device", round(ceilings.get("h2d", 0) / 1e9, 2), "GB/s"])
    out.writerow(["first step after open (capture included)", round(first, 4), "s"])
    out.writerow(["read bandwidth of the card", round(ceilings.get("read", 0) / 1e9, 1), "GB/s"])
    out.writerow([])
    out.writerow(SPEED_COLUMNS)
    for context, slots in DECODE_CASES:
        prefill_s, seconds, token = measure(engine, context, slots, token)
        p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
        row = [round(slots * context / prefill_s), round(slots / np.mean(seconds), 1), round(p50, 3), round(p99, 3)]
        out.writerow([commit.stdout.strip(), device, "h100/reference", context, slots, *row])
        sys.stdout.flush()
    if profile:
        print_profile(engine, out)


def measure(engine: Engine, context: int, slots: int, token: int) -> tuple[float, list[float], int]:
    """Seconds of the prefill of all slots and of every decode step."""
    rng = np.random.default_rng(2)
    vocab = engine.info.vocab_size
    with engine.session(slots, context + DECODE_STEPS + 4) as session:
        warm_up(session, min(context, PREFILL_TOKENS), vocab)
        started = time.perf_counter()
        for slot in range(slots):
            ids = rng.integers(0, vocab, context)
            for start in range(0, context, PREFILL_TOKENS):
                end = min(start + PREFILL_TOKENS, context)
                session.sample(ids[start:end], [slot] * (end - start), range(start, end), [end - start - 1], GREEDY)
        prefill = time.perf_counter() - started
        seconds = []
        tokens = [token] * slots
        for step in range(DECODE_STEPS + 4):
            position = context + step
            started = time.perf_counter()
            found = session.sample(tokens, range(slots), [position] * slots, range(slots), GREEDY)
            if step >= 4:  # the first ones capture the graph
                seconds.append(time.perf_counter() - started)
            # Random tokens: a greedy loop would hit few experts.
            tokens = [int(t) for t in rng.integers(0, vocab, slots)]
    return prefill, seconds, int(found[0])


def warm_up(session: Session, rows: int, vocab: int) -> None:
    """One prefill of a slot, so that its graph is captured before anything is timed."""
    session.sample([1 % vocab] * rows, [0] * rows, range(rows), [rows - 1], GREEDY)
    session.reset(0)


def print_profile(engine: Engine, out: Any) -> None:
    """The launches of a step, summed by operator; the times are between events inside one graph."""
    out.writerow([])
    out.writerow(PROFILE_COLUMNS)
    rng = np.random.default_rng(3)
    with engine.session(32, 2048) as session:
        for slot in range(32):
            session.step(rng.integers(0, engine.info.vocab_size, 1024), [slot] * 1024, range(1024), [])
        for rows, slots in ((1, 1), (32, 32)):
            times = [
                session.profile(
                    rng.integers(0, engine.info.vocab_size, rows), range(slots), [1024 + i] * slots, range(slots)
                )
                for i in range(3)
            ][-1]
            _write_profile(out, rows, times)
            session.truncate(0, 1024)
        session.reset(0)
        ids = rng.integers(0, engine.info.vocab_size, 1024)
        _write_profile(out, 1024, session.profile(ids, [0] * 1024, range(1024), [1023]))


def _write_profile(out: Any, rows: int, times: list[Any]) -> None:
    total = sum(launch.seconds for launch in times)
    for kernel in sorted({launch.kernel for launch in times}):
        own = [launch for launch in times if launch.kernel == kernel]
        seconds = sum(launch.seconds for launch in own)
        moved, flops = sum(la.bytes_moved for la in own), sum(la.flops for la in own)
        row = [round(seconds * 1e6, 1), round(seconds / total, 3), round(moved / seconds / 1e9, 1)]
        out.writerow([rows, kernel, len(own), *row, round(flops / seconds / 1e12, 2)])
    out.writerow([rows, "all", len(times), round(total * 1e6, 1), 1.0, "", ""])


def measure_ceilings() -> dict[str, float]:
    """Bytes a second: `read` of a large sum on the card, `h2d` from pinned memory; empty without torch and CUDA."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    on_card = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    pinned = torch.ones(1 << 28, dtype=torch.float32).pin_memory()
    return {
        "read": on_card.nbytes / _seconds(torch, on_card.sum),
        "h2d": pinned.nbytes / _seconds(torch, lambda: on_card[: 1 << 28].copy_(pinned, non_blocking=True)),
    }


def _seconds(torch: Any, call: Any) -> float:
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    for name in ("compile", "fill", "run"):
        step = steps.add_parser(name)
        step.add_argument("folder" if name != "run" else "engine", type=Path)
        if name == "fill":
            step.add_argument("engine", type=Path)
        if name == "run":
            step.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.step == "compile":
        compile_slice(options.folder)
    elif options.step == "fill":
        fill_slice(options.folder, options.engine)
    else:
        run_slice(options.engine, options.profile)


if __name__ == "__main__":
    main()
