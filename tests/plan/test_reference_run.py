"""The plan computes what the graph does: memory reuse and views change no bit."""

import pytest
import torch
from torch import Tensor

from dsv4c.graph.annotations import Numerics
from dsv4c.graph.interpreter import Oracle
from dsv4c.plan.execution_plan import BucketPlan, Launch
from dsv4c.plan.reference_run import ReferenceRun
from dsv4c.step_abi import LaunchFlag
from tests.fixtures import Quantization
from tests.graph.small_models import WALKS, checkpoint, plan, walk

# (bucket, rows of slot 0, rows of slot 1) of steps that go through every bucket, full and not.
STEPS = ((2, 25, 7), (1, 1, 1), (0, 1, 0), (2, 1, 4))


@pytest.mark.parametrize(("name", "numerics", "quantization"), [each for each in WALKS if each[2] != "bf16"])
def test_equals_the_graph_bit_for_bit(name: str, numerics: Numerics, quantization: Quantization) -> None:
    opened, made = checkpoint(name, quantization), plan(name, numerics, quantization)
    oracle = Oracle(walk(name, numerics, quantization).gm, opened, slots=2, context=256, poison=True)
    run = ReferenceRun(made, opened, slots=2, context=256)
    position = [0, 0]
    for bucket, *counts in STEPS:
        rows = [(slot, position[slot] + i) for slot, count in enumerate(counts) for i in range(count)]
        position = [start + count for start, count in zip(position, counts, strict=True)]
        ids = [(5 + 17 * p + 3 * slot) % opened.config.vocab_size for slot, p in rows]
        slots, positions = [slot for slot, _ in rows], [p for _, p in rows]
        found = run.step(made.buckets[bucket], ids, slots, positions)
        assert torch.equal(found, oracle.step(ids, slots, positions))
        assert not found.isnan().any()


def test_watch_sees_each_launch_in_order() -> None:
    opened, made = checkpoint("narrow"), plan("narrow", "exact")
    seen: list[tuple[int, str]] = []
    results: dict[str, Tensor] = {}

    def watch(number: int, launch: Launch, outputs: list[Tensor]) -> None:
        seen.append((number, launch.name))
        assert len(outputs) == len(launch.outputs)
        results.update({f"{launch.name}.{i}": output.clone() for i, output in enumerate(outputs)})

    trace: dict[str, Tensor] = {}
    bucket: BucketPlan = made.buckets[1]
    ReferenceRun(made, opened).step(bucket, [3, 4], [0, 0], [0, 1], watch)
    Oracle(walk("narrow", "exact", "fp8_fp4").gm, opened).step([3, 4], [0, 0], [0, 1], trace=trace)
    run = [each for each in bucket.launches if not each.flags & LaunchFlag.SAMPLE]
    assert seen == list(enumerate(each.name for each in run))
    assert torch.equal(results["l1_q_latent.0"], trace["l1_q_latent"])
    assert torch.equal(results["l2_mhc_mix.2"], trace["l2_mhc_mix"][2])


def test_a_step_fits_its_bucket() -> None:
    made = plan("narrow", "exact")
    with pytest.raises(AssertionError):
        ReferenceRun(made, checkpoint("narrow")).step(made.buckets[0], [1, 2], [0, 0], [0, 1])
