"""The machine code of a plan: every kernel compiled, put one after the other into the KERNELS section."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsv4c.cubin_cache import CubinCache
from dsv4c.engine.plan_section import KernelImage
from dsv4c.kernels.assign import plan_variants
from dsv4c.kernels.compile import compile_kernels, require_launchable
from dsv4c.kernels.compile_request import CompiledKernel
from dsv4c.plan.execution_plan import ExecutionPlan, KernelCall, KernelVariant
from dsv4c.target import Target

# Images begin on such a boundary, as the driver expects of the ELF files they are.
_IMAGE_ALIGN = 64


@dataclass(frozen=True)
class KernelSection:
    """`data` holds each image once; `facts` is what the manifest says of the kernels, empty without any."""

    data: bytes
    images: dict[KernelVariant, KernelImage]
    facts: list[dict[str, Any]]
    warnings: list[str]
    cached: int = 0  # images that did not have to be compiled


def compile_section(
    plan: ExecutionPlan,
    target: Target,
    cache: CubinCache | None,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> KernelSection:
    """Compile what `plan` calls. Raises KernelError where a kernel does not compile or its compiler is missing.

    `cache` None: every kernel is compiled anew. The same plan gives the same bytes.
    """
    variants = plan_variants(plan)
    if not variants:
        return KernelSection(b"", {}, [], [])
    counts: list[int] = []

    def report(done: int, total: int) -> None:
        counts.append(done)
        if progress is not None:
            progress(done, total)

    compiled = compile_kernels(variants, target.arch, cache, jobs=jobs, progress=report)
    for bucket in plan.buckets:
        for launch in bucket.launches:
            for call in launch.calls:
                require_launchable(call, compiled[call.variant], target)
    data = bytearray()
    places: dict[bytes, int] = {}
    images: dict[KernelVariant, KernelImage] = {}
    for variant in variants:
        kernel = compiled[variant]
        if kernel.cubin not in places:
            data.extend(bytes(-len(data) % _IMAGE_ALIGN))
            places[kernel.cubin] = len(data)
            data.extend(kernel.cubin)
        images[variant] = KernelImage(
            places[kernel.cubin], len(kernel.cubin), kernel.symbol, kernel.dynamic_shared_bytes
        )
    facts = [_facts(variant, compiled[variant], call, operator) for operator, variant, call in _first_uses(plan)]
    warnings = spill_warnings(compiled)
    if cache is not None and cache.warning is not None:
        warnings.append(cache.warning)
    # The first report comes when the cache has been looked through.
    return KernelSection(bytes(data), images, facts, warnings, counts[0])


def spill_warnings(compiled: Mapping[KernelVariant, CompiledKernel]) -> list[str]:
    """A line for each kernel some variants of which spill registers; the manifest says which."""
    entries = sorted({variant.entry for variant, kernel in compiled.items() if kernel.spill_bytes})
    warnings = []
    for entry in entries:
        spilled = [kernel.spill_bytes for variant, kernel in compiled.items() if variant.entry == entry]
        count = sum(size > 0 for size in spilled)
        most = f"{max(spilled):,} bytes at most"
        warnings.append(f"kernel {entry}: {count} of {len(spilled)} variants spill registers, {most}")
    return warnings


def _first_uses(plan: ExecutionPlan) -> Iterator[tuple[str, KernelVariant, KernelCall]]:
    """Each (operator, kernel) once, with the first call of it, sorted."""
    uses: dict[tuple[str, KernelVariant], KernelCall] = {}
    for bucket in plan.buckets:
        for launch in bucket.launches:
            for call in launch.calls:
                uses.setdefault((launch.kernel, call.variant), call)
    for operator, variant in sorted(uses, key=repr):
        yield operator, variant, uses[operator, variant]


def _facts(variant: KernelVariant, kernel: CompiledKernel, call: KernelCall, operator: str) -> dict[str, Any]:
    return {
        "operator": operator,
        "language": variant.language,
        "source": variant.source,
        "entry": variant.entry,
        "constants": dict(variant.constants),
        "parameters": [f"{arg.dtype.name.lower()}{list(arg.sizes)}" for arg in call.args],
        "block": call.block,
        "grid": list(call.grid),  # of the first bucket that uses it
        "programmatic": call.programmatic,
        "dynamic_shared_bytes": call.shared_bytes or kernel.dynamic_shared_bytes,
        "static_shared_bytes": kernel.shared_bytes,
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "code_bytes": len(kernel.cubin),
        "compiler": kernel.tool,
    }
