"""Weights that the build quantises: what the graph becomes, the bytes, the numbers, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.testing import FileCheck

from dsv4c.checkpoint.checkpoint import Checkpoint, open_checkpoint
from dsv4c.checkpoint.formats import Encoding
from dsv4c.checkpoint.quantization import Quantization, dequantize, quantize
from dsv4c.checkpoint.tensor_classes import DENSE, EXPERT
from dsv4c.errors import PassError
from dsv4c.graph.annotations import Numerics, get_parameter
from dsv4c.graph.interpreter import Oracle
from dsv4c.graph.parameters import WeightReader
from dsv4c.graph.printer import format_graph
from dsv4c.passes.pass_manager import run_passes
from dsv4c.passes.pipeline import build_pipeline
from dsv4c.passes.quantize_weights import quantize_weights
from dsv4c.plan.lowering import lower_graph
from dsv4c.plan.reference_run import ReferenceRun
from dsv4c.recipe import WeightsRecipe
from tests.fixtures import Quantization as Stored
from tests.fixtures import read_weights, write_checkpoint
from tests.graph.small_models import CONFIGS, ROLLBACK_ROWS, checkpoint, context, graph, max_difference, schedule_logits

# Inputs of `one_layer` are 96, 64, 48 and 40 wide; 64 divides those of `one_even`.
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def quantized(name: str, numerics: Numerics = "exact", stored: Stored = "none", **weights: Any) -> GraphModule:
    """A model after the pipeline up to `quantize_weights`, with a recipe's `[weights]`."""
    ctx = context(numerics)
    ctx = replace(ctx, recipe=replace(ctx.recipe, weights=WeightsRecipe(**weights)))
    passes = build_pipeline()
    return run_passes(graph(name, numerics, stored), passes[: passes.index(quantize_weights) + 1], ctx)


def whole(name: str, stored: Stored = "none", **weights: Any) -> GraphModule:
    ctx = context()
    ctx = replace(ctx, recipe=replace(ctx.recipe, weights=WeightsRecipe(**weights)))
    return run_passes(graph(name, "exact", stored), build_pipeline(), ctx)


def test_before_and_after() -> None:
    FileCheck().run(
        """
        # CHECK: %p_layers_0_attn_wq_a_stored_codes : float8_e4m3fn[64, 128] = weight codes of layers.0.attn.wq_a.weight (fp8_block 128x128 made of f32)
        # CHECK-NEXT: %p_layers_0_attn_wq_a_stored_scales : float8_e8m0fnu[1, 1] = weight scales of layers.0.attn.wq_a.weight
        # CHECK: %p_layers_0_ffn_experts_w13_stored_codes : uint8[5, 256, 64] = weight codes of layers.0.ffn.experts.{expert}.w1.weight + layers.0.ffn.experts.{expert}.w3.weight (int4_group 1x32 made of f32, 5 experts)
        # CHECK-NEXT: %p_layers_0_ffn_experts_w13_stored_scales : float16[5, 256, 4] = weight scales of
        # CHECK: %p_layers_0_ffn_experts_w2_stored_codes : uint8[5, 128, 64] = weight codes
        # CHECK: dsv4.moe_ffn(%l0_ffn_norm, %l0_route_ids, %l0_route_weights, %p_layers_0_ffn_experts_w13_stored_codes, %p_layers_0_ffn_experts_w13_stored_scales, %p_layers_0_ffn_experts_w2_stored_codes, %p_layers_0_ffn_experts_w2_stored_scales, 1, 32, 10.0, 0)
        """,  # noqa: E501
        format_graph(quantized("one_even", experts="int4", dense="fp8")),
    )


@pytest.mark.parametrize("choice", ["fp8", "int8", "int4"])
def test_only_what_the_released_models_quantise(choice: str) -> None:
    gm = quantized("one_even", experts=choice, dense=choice, experts_group=32, dense_group=32)
    names = {"experts": EXPERT, "dense": DENSE}
    for node in gm.graph.nodes:
        if (what := get_parameter(node)) is None:
            continue
        source = what.sources[0].format(expert=0)
        assert (what.quantization is not None) == any(map(lambda p, n=source: p.fullmatch(n), names.values())), source


@pytest.mark.parametrize("numerics", ["exact", "reference"])
def test_fp8_and_fp4_are_the_bytes_of_the_released_form(numerics: Numerics) -> None:
    """The engine made of unquantised weights computes with the very operands of the one made of quantised ones."""
    stored, made = checkpoint("one_layer", "fp8_fp4"), checkpoint("one_layer", "none")
    kept = quantized("one_layer", numerics, "fp8_fp4")
    gm = quantized("one_layer", numerics, "none", experts="fp4", dense="fp8")
    assert format_graph(gm).replace(" made of f32", "") == format_graph(kept)
    ours, theirs = WeightReader(made), WeightReader(stored)
    for a, b in zip(gm.graph.nodes, kept.graph.nodes, strict=True):
        if (what := get_parameter(a)) is not None and (other := get_parameter(b)) is not None:
            assert torch.equal(raw(ours.load(what)), raw(theirs.load(other))), a.name


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize(("choice", "rounding"), [("int8", "nearest"), ("int4", "search")])
def test_numbers_are_those_of_the_decoded_weights(tmp_path: Any, choice: str, rounding: str) -> None:
    """The whole pipeline and the plan, against a checkpoint that holds the decoded values in float32."""
    opened = checkpoint("one_even", "none")
    encoding = {"int8": Encoding.INT8_GROUP, "int4": Encoding.INT4_GROUP}[choice]
    values = read_weights(opened.path)
    for name, value in values.items():
        group = 32 if EXPERT.fullmatch(name) else 64 if DENSE.fullmatch(name) else 0
        if group:
            how = Quantization(encoding, (1, group), rounding == "search")
            values[name] = dequantize(*quantize(value, how), how)
    decoded = open_checkpoint(write_checkpoint(tmp_path / "decoded", CONFIGS["one_even"], values))
    gm = whole("one_even", experts=choice, dense=choice, dense_group=64, rounding=rounding)
    plain = whole("one_even")
    wanted = schedule_logits(plain, decoded)
    assert max_difference(schedule_logits(gm, opened), wanted) < 2e-5
    assert max_difference(schedule_logits(plain, opened), wanted) > 1e-3
    assert_plan_agrees(gm, opened)


def assert_plan_agrees(gm: GraphModule, opened: Checkpoint) -> None:
    plan = lower_graph(gm, (1,), (32,), ROLLBACK_ROWS)
    rows = [0] * len(IDS), list(range(len(IDS)))
    found = ReferenceRun(plan, opened, context=256).step(plan.buckets[1], IDS, *rows)
    torch.testing.assert_close(found, Oracle(gm, opened, context=256).step(IDS, *rows), rtol=0, atol=1e-6)


def test_projections_merge_where_they_are_made_alike() -> None:
    text = format_graph(whole("one_even", dense="int8", dense_group=32))
    FileCheck().run(
        "# CHECK: int8[128, 128] = weight codes of layers.0.attn.wq_a.weight + layers.0.attn.wkv.weight"
        " (int8_group 1x32 made of f32)\n# CHECK-NEXT: float16[128, 4] = weight scales",
        text,
    )


def test_inputs_are_rounded_for_fp8_and_fp4_only() -> None:
    def rounded(**weights: Any) -> tuple[bool, bool]:
        text = format_graph(quantized("one_even", "reference", "none", **weights))
        return "dsv4.fp8_round(%l0_attn_norm" in text, ", 10.0, 128)" in text

    assert rounded() == (False, False)
    assert rounded(dense="fp8", experts="int4") == (True, False)
    assert rounded(dense="int8", dense_group=64, experts="fp4") == (False, True)


def test_stored_encoding_keeps_its_bytes_and_another_is_made_of_its_values() -> None:
    same = quantized("one_layer", "exact", "fp8_fp4", experts="fp4", dense="fp8", rounding="search")
    assert format_graph(same) == format_graph(quantized("one_layer", "exact", "fp8_fp4"))
    opened = checkpoint("one_layer", "fp8_fp4")
    gm = quantized("one_layer", "exact", "fp8_fp4", experts="int8", experts_group=32)
    node = next(n for n in gm.graph.nodes if n.name == "p_layers_0_ffn_experts_w2_stored_codes")
    what = get_parameter(node)
    assert what is not None and what.encoding is Encoding.FP4_GROUP and what.stored_as is Encoding.INT8_GROUP
    values = opened.values("layers.0.ffn.experts.3.w2.weight")
    codes, _ = quantize(values, Quantization(Encoding.INT8_GROUP, (1, 32)))
    assert torch.equal(WeightReader(opened).load(what)[3], codes)


@pytest.mark.parametrize(
    ("name", "weights", "message", "hint"),
    [
        (
            "one_layer",
            {"experts": "int4", "experts_group": 64},
            r"layers.0.ffn.experts.\{expert\}.w1.weight has 96 inputs, which groups of 64 do not divide "
            r"\(`weights.experts` is 'int4'\)",
            "set `weights.experts_group` to 32",
        ),
        (
            "one_layer",
            {"dense": "int8", "dense_group": 32},
            r"layers.0.attn.wq_b.weight has 48 inputs, which groups of 32 do not divide",
            'use `dense = "fp8"`',
        ),
    ],
)
def test_sizes_that_do_not_divide(name: str, weights: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(PassError, match=message) as raised:
        quantized(name, **weights)
    assert raised.value.hint is not None and hint in raised.value.hint


def test_scales_wait_for_one_question_only() -> None:
    """What a reader keeps does not grow with the model."""
    opened = checkpoint("one_even", "none")
    reader = WeightReader(opened)
    for node in quantized("one_even", experts="int4", dense="int8", dense_group=32).graph.nodes:
        if (what := get_parameter(node)) is not None:
            reader.load(what)
    assert not reader._scales
