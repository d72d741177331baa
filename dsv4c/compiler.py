"""`build_engine`: the stages in order, checkpoint to engine file."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsv4c.checkpoint.checkpoint import Checkpoint, open_checkpoint
from dsv4c.checkpoint.scan import scan_checkpoint
from dsv4c.cubin_cache import default_cache
from dsv4c.engine.goldens import Goldens
from dsv4c.engine.plan_section import encode_plan
from dsv4c.engine.reader import is_engine, read_engine
from dsv4c.engine.summary import weight_lines
from dsv4c.engine.writer import EngineParts, check_space, write_engine
from dsv4c.errors import InputError
from dsv4c.goldens import record_goldens
from dsv4c.graph.annotations import unplaced_experts
from dsv4c.graph.builder import build_graph
from dsv4c.graph.parameters import Measure, WeightReader
from dsv4c.kernel_section import KernelSection, compile_section
from dsv4c.kernels.assign import assign_kernels
from dsv4c.passes.pass_manager import PassContext, run_passes
from dsv4c.passes.pipeline import build_pipeline
from dsv4c.plan.execution_plan import BucketPlan, ExecutionPlan
from dsv4c.plan.expert_facts import expert_facts
from dsv4c.plan.lowering import lower_graph
from dsv4c.plan.printer import format_plan
from dsv4c.plan.reference_run import extent_bytes
from dsv4c.planning.capacity import Fit, build_fit, check_memory, require_fit
from dsv4c.planning.routed_experts import engine_experts, l2_notes
from dsv4c.planning.targets import find_plan_target
from dsv4c.recipe import Recipe
from dsv4c.text import TOKENIZER_FILE
from dsv4c.version import VERSION
from dsv4c.weight_report import ErrorMeter, WeightTotal, weight_totals

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class BuildReport:
    """What was built. Sizes in bytes; `arena` is that of the largest bucket, with and without reuse of memory."""

    engine: Path
    digest: str
    size_bytes: int
    weight_bytes: int
    weights: list[WeightTotal]
    launches_per_step: int
    calls_per_step: int  # kernel launches; an operator may take several
    kernels: int
    kernels_cached: int  # of them, that did not have to be compiled
    buckets: int
    arena_bytes: int
    arena_unshared_bytes: int
    state_bytes_per_slot: int
    state_bytes_per_token: float
    memory_bytes: int
    memory_needed_bytes: int  # to serve one sequence of the default context (dsv4c/planning/capacity.py)
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "engine": str(self.engine)}

    def to_text(self) -> str:
        saved = 1 - self.arena_bytes / self.arena_unshared_bytes
        lines = [
            f"engine    {self.engine} ({self.size_bytes / 1e6:.1f} MB, digest {self.digest[:16]})",
            f"weights   {self.weight_bytes / 1e6:.1f} MB",
            *(f"  {line}" for line in weight_lines([total.to_dict() for total in self.weights])),
            f"plan      {self._plan_text()}",
            f"arena     {self.arena_bytes / 1e6:.2f} MB in the largest bucket, {saved:.0%} saved by reuse",
            f"state     {self.state_bytes_per_slot / 1e6:.2f} MB a slot, "
            f"{self.state_bytes_per_token:.0f} bytes a token",
            f"memory    {self._memory_text()}",
        ]
        return "\n".join(lines + [f"warning: {warning}" for warning in self.warnings])

    def _plan_text(self) -> str:
        calls = f" by {self.calls_per_step} kernel calls" if self.calls_per_step != self.launches_per_step else ""
        cached = f" ({self.kernels_cached} from the cache)" if self.kernels_cached else ""
        kernels = f"{self.kernels} kernels{cached}"
        return f"{self.launches_per_step} launches a step{calls}, {kernels}, {self.buckets} buckets"

    def _memory_text(self) -> str:
        needed, memory = self.memory_needed_bytes, self.memory_bytes
        margin = f"margin {(memory - needed) / 1e9:.2f} GB" if needed <= memory else "more than there is (--force)"
        return f"{needed / 1e9:.2f} GB for one sequence, {needed / memory:.0%} of {memory / 1e9:.2f} GB, {margin}"


def build_engine(
    checkpoint_path: Path,
    recipe: Recipe,
    output: Path,
    *,
    dump_dir: Path | None = None,
    split_weights: bool = False,
    goldens: bool = True,
    check_values: bool = True,
    memory_gb: float | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> BuildReport:
    """Compile a checkpoint into the engine file `output`.

    Raises the Dsv4cError of the stage that cannot go on; then no file is left. `progress(what, done, total)` is called
    from the slow stages. A model that does not fit the target's memory (`memory_gb`: decimal, instead of the target's)
    is refused before any work, unless `force`, which the manifest records.
    """
    checkpoint = open_checkpoint(checkpoint_path)
    output = _checked_output(output, checkpoint)
    recipe.require_model(checkpoint.config.num_hidden_layers, checkpoint.config.n_routed_experts)
    target = find_plan_target(recipe.target.name, memory_gb)
    if not force:
        check_memory(checkpoint, recipe, target)
    graph = build_graph(checkpoint.config, checkpoint.weights, recipe.numerics, recipe.rollback_rows)
    _prepare_dump_dir(dump_dir)
    graph = run_passes(graph, build_pipeline(), PassContext(recipe.target, recipe, dump_dir))
    lowered = lower_graph(graph, recipe.decode_buckets, recipe.mixed_buckets, recipe.rollback_rows)
    plan = assign_kernels(lowered, recipe.target)
    fit = build_fit(plan, target)
    if not force:
        require_fit(fit, target, str(checkpoint_path))
    notes = l2_notes(engine_experts(plan), recipe, target)
    if recipe.numerics == "reference" and (reason := unplaced_experts(graph)):
        notes.append(f"routed experts run in several launches: {reason}")
    if dump_dir is not None:
        (dump_dir / "plan.txt").write_text(format_plan(plan))
    check_space(output, plan.weights.size_bytes)
    code = compile_section(plan, recipe.target, default_cache(), progress=_stage(progress, "compiling kernels"))
    if dump_dir is not None:
        _dump_kernels(dump_dir / "kernels", code)
    scan = scan_checkpoint(checkpoint, check_values=check_values, progress=_stage(progress, "reading the checkpoint"))
    warnings = notes + checkpoint.warnings + code.warnings + scan.warnings
    if TOKENIZER_FILE not in checkpoint.tokenizer_texts():
        warnings.append(f"no {TOKENIZER_FILE} in {checkpoint_path}: the engine takes token ids only (run --ids)")
    recorded = None
    if goldens:
        count = recipe.golden_tokens
        recorded = record_goldens(lowered, checkpoint, recipe.numerics, count, _stage(progress, "recording goldens"))
    parts = EngineParts(
        arch=recipe.target.arch,
        manifest={**_manifest(checkpoint, scan.digest, recipe, plan, code), "forced": force},
        plan=encode_plan(plan, code.images),
        tokenizer_files=checkpoint.tokenizer_texts(),
        goldens=recorded.to_dict() if isinstance(recorded, Goldens) else None,
        weight_bytes=plan.weights.size_bytes,
        kernels=code.data,
    )
    errors = ErrorMeter()
    blocks = weight_blocks(checkpoint, plan, _stage(progress, "writing weights"), errors)

    def measured() -> dict[str, Any]:
        return {"weights": [total.to_dict() for total in weight_totals(plan, errors)]}

    write_engine(output, parts, blocks, split_weights=split_weights, measured=measured)
    return _report(output, plan, code, weight_totals(plan, errors), fit, warnings)


def _stage(progress: Progress | None, what: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(what, done, total)


def _checked_output(output: Path, checkpoint: Checkpoint) -> Path:
    """The file to write, links followed; raises InputError where writing it would destroy something else."""
    target = output.resolve()
    if target.exists() and not target.is_file():
        raise InputError(f"the output {output} is no regular file", hint="name the engine file to write with -o")
    inputs = {path.resolve() for path in checkpoint.path.iterdir()}
    if target in inputs and not is_engine(target):
        raise InputError(
            f"the output {output} is a file of the checkpoint", hint="choose another name or folder with -o"
        )
    return target


def _prepare_dump_dir(dump_dir: Path | None) -> None:
    if dump_dir is None:
        return
    try:
        dump_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the dump folder {dump_dir}: {error.strerror}", hint="name a folder that can be written to"
        ) from None


def _dump_kernels(folder: Path, code: KernelSection) -> None:
    """The machine code of every kernel, for disassemblers; nothing on a target whose kernels the runtime brings."""
    for number, (variant, image) in enumerate(code.images.items()):
        folder.mkdir(exist_ok=True)
        data = code.data[image.offset : image.offset + image.size_bytes]
        (folder / f"{number:03}-{variant.entry}.cubin").write_bytes(data)


def weight_blocks(
    checkpoint: Checkpoint,
    plan: ExecutionPlan,
    progress: Callable[[int, int], None] | None = None,
    measure: Measure | None = None,
) -> Iterator[memoryview]:
    """The bytes of the WEIGHTS section in order, a tensor or a packed expert at a time, its pages dropped after use."""
    weights = WeightReader(checkpoint, measure)
    written = 0
    for number, extent in enumerate(plan.weights.extents):
        if extent.offset > written:
            yield memoryview(bytes(extent.offset - written))
        data = extent_bytes(weights, extent)
        assert data.numel() == extent.size_bytes, extent
        yield memoryview(data.numpy())  # type: ignore[arg-type]  # numpy's stubs know no Buffer
        for source in extent.sources:
            checkpoint.release(source)
        written = extent.offset + extent.size_bytes
        if progress is not None:
            progress(number + 1, len(plan.weights.extents))
    if written < plan.weights.size_bytes:
        yield memoryview(bytes(plan.weights.size_bytes - written))


def _manifest(
    checkpoint: Checkpoint, digest: str, recipe: Recipe, plan: ExecutionPlan, code: KernelSection
) -> dict[str, Any]:
    """What people and tools read; nothing in it depends on the machine, the clock or a path."""
    config = checkpoint.config
    encodings = Counter(info.encoding.value for info in checkpoint.weights.values())
    return {
        "dsv4c_version": VERSION,
        "target": recipe.target.name,
        "arch": recipe.target.arch,
        "recipe": recipe.to_dict(),
        "model": {
            "model_type": config.model_type,
            "layers": [
                {"kind": la.kind.value, "ratio": la.ratio, "hash_routed": la.hash_routed} for la in config.layers
            ],
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position_embeddings,
            "experts": config.n_routed_experts,
            "experts_per_token": config.num_experts_per_tok,
        },
        "checkpoint": {
            "digest": digest,
            "naming": checkpoint.naming,
            "tensors": len(checkpoint.weights),
            "encodings": dict(sorted(encodings.items())),
        },
        "draft": {
            "kind": config.draft.kind if config.draft else None,
            "tensors": len(checkpoint.draft_weights),
            "compiled": False,
        },
        "passes": [run.__name__ for run in build_pipeline()],
        "kernels": list(plan.kernels),
        "experts": expert_facts(plan, recipe),
        "machine_code": code.facts,
        "buckets": [
            {
                "kind": bucket.kind.name.lower(),
                "tokens": bucket.tokens,
                "sm_count": bucket.sm_count,
                "launches": len(bucket.launches),
                "calls": _call_count(bucket),
                "arena_bytes": bucket.arena_bytes,
                "arena_unshared_bytes": bucket.unshared_bytes,
                "bytes_moved": sum(launch.bytes_moved for launch in bucket.launches),
                "flops": sum(launch.flops for launch in bucket.launches),
            }
            for bucket in plan.buckets
        ],
        "state": {
            "block_tokens": plan.block_tokens,
            "bytes_per_slot": plan.state.slot_bytes,
            "bytes_per_block": plan.state.block_bytes,
            "bytes_per_session": plan.state.session_bytes,
        },
        "weight_bytes": plan.weights.size_bytes,
    }


def _call_count(bucket: BucketPlan) -> int:
    """Kernel launches of a step, one for an operator that the runtime brings."""
    return sum(max(1, len(launch.calls)) for launch in bucket.launches)


def _report(
    output: Path,
    plan: ExecutionPlan,
    code: KernelSection,
    weights: list[WeightTotal],
    fit: Fit,
    warnings: list[str],
) -> BuildReport:
    reader = read_engine(output)
    largest = max(plan.buckets, key=lambda bucket: bucket.arena_bytes)
    return BuildReport(
        engine=output,
        digest=reader.digest,
        size_bytes=output.stat().st_size,
        weight_bytes=plan.weights.size_bytes,
        weights=weights,
        launches_per_step=len(largest.launches),
        calls_per_step=_call_count(largest),
        kernels=len(code.images) or len(plan.kernels),
        kernels_cached=code.cached,
        buckets=len(plan.buckets),
        arena_bytes=largest.arena_bytes,
        arena_unshared_bytes=largest.unshared_bytes,
        state_bytes_per_slot=plan.state.slot_bytes,
        state_bytes_per_token=plan.state.block_bytes / plan.block_tokens,
        memory_bytes=fit.memory,
        memory_needed_bytes=fit.needed,
        warnings=warnings,
    )
