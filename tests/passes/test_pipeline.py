"""The whole pipeline: the same model at its end, every pass truthful, and its text."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsv4c.graph.annotations import Numerics
from dsv4c.graph.printer import format_graph
from dsv4c.passes.pass_manager import run_passes
from dsv4c.passes.pipeline import build_pipeline
from dsv4c.plan.lowering import lower_graph
from dsv4c.plan.reference_run import ReferenceRun
from tests.fixtures import Quantization
from tests.graph.small_models import (
    DECODE_BUCKETS,
    MIXED_BUCKETS,
    ROLLBACK_ROWS,
    SCHEDULE,
    WALKS,
    checkpoint,
    context,
    final_graph,
    graph,
    max_difference,
    schedule_logits,
    step_rows,
    walk,
)


@pytest.mark.parametrize(("name", "numerics", "quantization"), WALKS)
def test_the_numbers_stay(name: str, numerics: Numerics, quantization: Quantization) -> None:
    stages = walk(name, numerics, quantization).stages
    first, last = stages["canonicalize"].logits_before, stages["plan_state"].logits_after
    difference = max_difference(first, last)
    assert not any(logits.isnan().any() for logits in last)
    if numerics == "exact":
        assert difference <= 1e-4
    elif quantization == "bf16":
        # Logits have a spread of 1. A sum in another order flips roundings of bfloat16.
        assert difference <= 0.1
    else:
        # From `quantize_weights` on, projections take rounded activations: what the model was trained with.
        moved = [run for run, stage in stages.items() if max_difference(stage.logits_before, stage.logits_after) > 0.1]
        assert moved == ["quantize_weights"]


@pytest.mark.parametrize(("name", "numerics", "quantization"), WALKS)
def test_modified_is_truthful(name: str, numerics: Numerics, quantization: Quantization) -> None:
    for run, stage in walk(name, numerics, quantization).stages.items():
        assert stage.modified == (stage.before != stage.after), run


@pytest.mark.parametrize("numerics", ["exact", "reference"])
def test_nothing_is_left_that_the_plan_cannot_lower(numerics: Numerics) -> None:
    views = {"aten.reshape", "aten.slice", "aten.unsqueeze", "aten.expand"}
    for name in ("narrow", "partial_blocks"):
        text = format_graph(walk(name, numerics, "fp8" if (name, numerics) == WALKS[3][:2] else "fp8_fp4").gm)
        called = {line.split(" = ")[1].split("(")[0] for line in text.splitlines() if " = aten." in line}
        assert called <= views
        assert " = weight values" not in text


@pytest.mark.parametrize("numerics", ["exact", "reference"])
def test_golden(numerics: Numerics, golden: Callable[[str, str], None]) -> None:
    golden(f"pipeline/tiny-{numerics}.txt", format_graph(final_graph("tiny", numerics)))


def test_golden_of_a_cuda_target(golden: Callable[[str, str], None]) -> None:
    gm = run_passes(graph("tiny", "reference"), build_pipeline(), context("reference", target="h100"))
    golden("pipeline/tiny-reference-h100.txt", format_graph(gm))


@pytest.mark.parametrize(("name", "numerics"), [("narrow", "exact"), ("partial_blocks", "reference")])
def test_a_cuda_target_computes_the_same(name: str, numerics: Numerics) -> None:
    """Its operators stand for more than one of those of the cpu, and differ in no bit."""
    opened = checkpoint(name)
    gm = run_passes(graph(name, numerics), build_pipeline(), context(numerics, target="h100"))
    called = {line.split(" = ")[1].split("(")[0] for line in format_graph(gm).splitlines() if " = dsv4." in line}
    assert {"dsv4.row_chain", "dsv4.mhc_mix_norm", "dsv4.attention_unrotated"} <= called
    assert not {"dsv4.mhc_mix", "dsv4.attention", "dsv4.hadamard"} & called
    logits = schedule_logits(gm, opened)
    expected = schedule_logits(final_graph(name, numerics), opened)
    assert all(torch.equal(a, b) for a, b in zip(expected, logits, strict=True))


def test_the_plan_of_a_cuda_target_runs_on_the_reference_bodies() -> None:
    opened = checkpoint("partial_blocks")
    gm = run_passes(graph("partial_blocks", "reference"), build_pipeline(), context("reference", target="h100"))
    lowered = lower_graph(gm, DECODE_BUCKETS, MIXED_BUCKETS, ROLLBACK_ROWS)
    run = ReferenceRun(lowered, opened, slots=2, context=256)
    bucket = lowered.buckets[-1]
    expected = schedule_logits(gm, opened)
    for step, wanted in zip(SCHEDULE, expected, strict=True):
        assert torch.equal(run.step(bucket, *step_rows(step, opened.config.vocab_size)), wanted)


def test_the_same_graph_twice_gives_the_same_dumps(tmp_path: Path) -> None:
    dumps = []
    for turn in ("a", "b"):
        (tmp_path / turn).mkdir()
        run_passes(graph("one_layer"), build_pipeline(), context(dump_dir=tmp_path / turn))
        dumps.append({file.name: file.read_text() for file in sorted((tmp_path / turn).iterdir())})
    assert dumps[0] == dumps[1]
    names = ["input", *(run.__name__ for run in build_pipeline())]
    assert list(dumps[0]) == [f"{number:02}-{name}.txt" for number, name in enumerate(names)]


def test_the_readme_names_every_pass_in_order() -> None:
    readme = (Path(__file__).parents[2] / "dsv4c" / "passes" / "README.md").read_text()
    table = readme[readme.index("## The order") :]
    assert [f"`{run.__name__}`" for run in build_pipeline()] == [
        line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| `")
    ]
