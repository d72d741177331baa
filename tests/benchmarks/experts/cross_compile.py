"""Planned calls to cubins and a manifest, where the kernel compilers are; needs no GPU."""

import hashlib
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from dsv4c.cubin_cache import default_cache
from dsv4c.errors import KernelError
from dsv4c.kernels.compile import compile_kernels, require_launchable
from dsv4c.kernels.compile_request import CompiledKernel, parse_constant
from dsv4c.kernels.select.selection import cuda_variant
from dsv4c.plan.execution_plan import KernelCall, KernelVariant
from tests.benchmarks.experts.manifest import Argument, Call, Manifest, Variant, write_manifest
from tests.benchmarks.experts.planned_calls import SHAPES, TARGET, Change, Choice, plan

READ_BYTES = 4 << 30


def compile_variants(folder: Path, choice: Choice) -> int:
    """Writes the cubins and the manifest; the number of variants that did not compile."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.cubin"):
        stale.unlink()
    planned = list(plan(choice))
    kernels = _compile(call.variant for one in planned for call in one.calls)
    variants = []
    for one in planned:
        if all(call.variant in kernels for call in one.calls):
            pairs = zip(one.calls, one.arguments, strict=True)
            calls = (_written(folder, call, kernels[call.variant], arguments) for call, arguments in pairs)
            variants.append(replace(one.variant, calls=tuple(calls)))
    shapes = tuple(shape for shape in SHAPES if shape.name in choice.shapes)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    tools = {"read_bandwidth": _read_kernel(folder, choice.sm_count)}
    write_manifest(folder, Manifest(commit.stdout.strip(), shapes, tuple(variants), tools))
    _print_variants(variants)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{len(variants)} of {len(planned)} variants, {size / 1e6:.1f} MB in {folder}")
    return len(planned) - len(variants)


def parse_change(text: str) -> tuple[str, Change]:
    """`label:NAME=VALUE,...`"""
    label, _, rest = text.partition(":")
    return label, dict(parse_constant(part) for part in rest.split(",") if part)


def _compile(variants: Iterable[KernelVariant]) -> dict[KernelVariant, CompiledKernel]:
    """Without those that do not compile, which are told."""
    wanted = list(dict.fromkeys(variants))
    cache = default_cache()
    try:
        return compile_kernels(wanted, TARGET.arch, cache, progress=_progress)
    except KernelError:
        found = {}
        for variant in wanted:
            try:
                found |= compile_kernels([variant], TARGET.arch, cache)
            except KernelError as error:
                print(error.to_text(), file=sys.stderr)
        return found


def _progress(done: int, total: int) -> None:
    print(f"\r{done}/{total} kernels", end="" if done < total else "\n", file=sys.stderr, flush=True)


def _read_kernel(folder: Path, sm_count: int) -> Call:
    variant = cuda_variant("read_bandwidth", "read_bandwidth", BYTES=READ_BYTES)
    kernel = compile_kernels([variant], TARGET.arch, default_cache(), folder=Path(__file__).parent)[variant]
    return _written(folder, KernelCall(variant, (4 * sm_count, 1, 1), 512, ()), kernel, ())


def _written(folder: Path, call: KernelCall, kernel: CompiledKernel, arguments: tuple[Argument, ...]) -> Call:
    """The call as the manifest has it; warns of what the card would refuse, or the kernel does not expect."""
    name = f"{hashlib.sha256(kernel.cubin).hexdigest()[:16]}.cubin"
    (folder / name).write_bytes(kernel.cubin)
    try:
        require_launchable(call, kernel, TARGET)
    except KernelError as error:
        print(error.to_text(), file=sys.stderr)
    if kernel.threads and call.block != kernel.threads:
        print(f"{kernel.symbol}: {call.block} threads a block, compiled for {kernel.threads}", file=sys.stderr)
    return Call(
        cubin=name,
        symbol=kernel.symbol,
        grid=call.grid,
        block=call.block,
        shared_bytes=call.shared_bytes,
        programmatic=call.programmatic,
        arguments=arguments,
        constants=dict(call.variant.constants),
        registers=kernel.registers,
        spill_bytes=kernel.spill_bytes,
    )


def _print_variants(variants: list[Variant]) -> None:
    for variant in variants:
        facts = [
            f"{call.symbol} {call.registers} registers{f', {call.spill_bytes} B spilled' if call.spill_bytes else ''}"
            for call in variant.calls
        ]
        print(f"{variant.name}: {'; '.join(facts)}")
