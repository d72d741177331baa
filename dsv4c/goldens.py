"""Recording goldens: the plan run on the reference bodies at build time."""

from collections.abc import Callable

import torch

from dsv4c.checkpoint.checkpoint import Checkpoint
from dsv4c.engine.goldens import GoldenLaunch, Goldens, GoldenStep, fingerprint
from dsv4c.graph.annotations import Numerics
from dsv4c.graph.sampling import philox
from dsv4c.plan.execution_plan import BucketPlan, ExecutionPlan, Launch
from dsv4c.plan.reference_run import ReferenceRun
from dsv4c.step_abi import BucketKind

# (tolerance, quantile). Exact numerics differ in the order of float32 sums only. In the reference numerics a sum that
# falls on the other side of a rounding moves a value by a step of e4m3 or e2m1, and where two experts score alike a row
# may go to the other one and differ from there on; a wrong kernel is wrong in most values.
_AGREEMENT: dict[Numerics, tuple[float, float]] = {"exact": (1e-3, 1.0), "reference": (0.25, 0.5)}
_SEED = 4


def golden_tokens(count: int, vocab_size: int) -> list[int]:
    """`count` token ids spread over the vocabulary, the same for every build."""
    return [philox(_SEED, index)[0] % vocab_size for index in range(count)]


def record_goldens(
    plan: ExecutionPlan,
    checkpoint: Checkpoint,
    numerics: Numerics,
    tokens: int,
    progress: Callable[[int, int], None] | None = None,
) -> Goldens:
    """Two steps of one sequence: all tokens but the last in a mixed bucket, the last in a decode bucket."""
    largest = max(bucket.tokens for bucket in plan.buckets if bucket.kind is BucketKind.MIXED)
    ids = golden_tokens(min(tokens, largest + 1, plan.max_context), plan.vocab_size)
    run = ReferenceRun(plan, checkpoint, slots=1, context=len(ids))
    parts = [ids[:-1], ids[-1:]] if len(ids) > 1 else [ids]
    steps, position = [], 0
    total = len(parts) * len(plan.buckets[0].launches)
    for number, part in enumerate(parts):
        bucket = choose_bucket(plan, len(part))
        launches: list[GoldenLaunch] = []

        def watch(index: int, launch: Launch, outputs: list[torch.Tensor], seen: list[GoldenLaunch] = launches) -> None:
            prints = tuple(fingerprint(out.float().numpy()) for out in outputs)
            seen.append(GoldenLaunch(launch.kernel, launch.name, launch.layer, prints))
            if progress is not None:
                progress(min(total, number * total // len(parts) + index + 1), total)  # noqa: B023

        run.step(bucket, part, [0] * len(part), list(range(position, position + len(part))), watch)
        steps.append(GoldenStep(tuple(part), position, tuple(launches)))
        position += len(part)
    return Goldens(*_AGREEMENT[numerics], tuple(steps))


def choose_bucket(plan: ExecutionPlan, rows: int) -> BucketPlan:
    """The bucket the runtime takes for `rows` rows of one slot: decode for a single row, else the smallest mixed."""
    kinds = (BucketKind.DECODE, BucketKind.MIXED) if rows == 1 else (BucketKind.MIXED,)
    for kind in kinds:
        fitting = [b for b in plan.buckets if b.kind is kind and b.tokens >= rows]
        if fitting:
            return min(fitting, key=lambda b: b.tokens)
    raise AssertionError(f"no bucket for {rows} rows")
