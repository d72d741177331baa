"""Projections of one input become one product, with scales that belong to one source each."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.testing import FileCheck

from dsv4c.checkpoint.config import LayerKind
from dsv4c.checkpoint.formats import Encoding
from dsv4c.graph.annotations import Parameter, get_placeholder, set_flags
from dsv4c.graph.ops import decode_weight
from dsv4c.graph.parameters import load_parameter
from dsv4c.graph.printer import format_graph
from dsv4c.passes.merge_projections import merge_projections
from dsv4c.passes.pass_manager import run_passes
from dsv4c.step_abi import LaunchFlag
from tests.fixtures import Quantization
from tests.graph.scratch import Scratch
from tests.graph.small_models import WALKS, checkpoint, context, max_difference, walk

dsv4 = torch.ops.dsv4


def test_before_and_after() -> None:
    stage = walk("partial_blocks", "exact", "fp8").stages["merge_projections"]
    FileCheck().run(
        """
        # CHECK: %l1_q_a : float32[T, 160] = dsv4.linear(%l1_attn_norm, %p_layers_1_attn_wq_a_stored_codes, %p_layers_1_attn_wq_a_stored_scales, 128, 128, float32)
        # CHECK: %l1_kv_proj : float32[T, 96] = dsv4.linear(%l1_attn_norm, %p_layers_1_attn_wkv_stored_codes, %p_layers_1_attn_wkv_stored_scales, 128, 128, float32)
        """,  # noqa: E501
        stage.before,
    )
    FileCheck().run(
        """
        # CHECK: %p_layers_1_attn_wq_a_and_1_more_codes : float8_e4m3fn[256, 192] = weight codes of layers.1.attn.wq_a.weight + layers.1.attn.wkv.weight (fp8_block 32x128)
        # CHECK: %p_layers_1_attn_wq_a_and_1_more_scales : float8_e8m0fnu[8, 2] = weight scales of
        # CHECK: %l1_merged : float32[T, 256] = dsv4.linear(%l1_attn_norm, %p_layers_1_attn_wq_a_and_1_more_codes, %p_layers_1_attn_wq_a_and_1_more_scales, 32, 128, float32)
        # CHECK-NEXT: %l1_part : float32[T, 160] = aten.slice(%l1_merged, 1, 0, 160)
        # CHECK-NEXT: %l1_part_1 : float32[T, 96] = aten.slice(%l1_merged, 1, 160, 256)
        # CHECK-NEXT: %l1_q_latent : float32[T, 160] = dsv4.rms_norm(%l1_part,
        """,  # noqa: E501
        stage.after,
    )
    # The compressor and the indexer's read the same unquantised input: four weights in one.
    FileCheck().check("%p_layers_1_attn_compressor_wkv_and_").check("layers.1.attn.indexer.compressor.wgate").run(
        stage.after
    )


@pytest.mark.parametrize(("name", "numerics", "quantization"), WALKS)
def test_the_same_numbers(name: str, numerics: str, quantization: Quantization) -> None:
    stage = walk(name, numerics, quantization).stages["merge_projections"]  # type: ignore[arg-type]
    # A wider product may sum in another order; in bf16 a rounding then falls on the other side.
    tolerance = 1e-5 if numerics == "exact" else 0.1
    assert max_difference(stage.logits_before, stage.logits_after) <= tolerance


@pytest.mark.parametrize(("name", "quantization"), [("partial_blocks", "fp8"), ("narrow", "fp8_fp4")])
def test_no_scale_straddles_two_sources(name: str, quantization: Quantization) -> None:
    opened = checkpoint(name, quantization)
    merged: dict[tuple[str, ...], dict[str, Parameter]] = {}
    for node in walk(name, "exact", quantization).gm.graph.nodes:
        if node.op == "placeholder" and isinstance(what := get_placeholder(node), Parameter) and not what.experts:
            if what.block is None or len(what.sources) == 1:
                continue
            assert all(border % what.block[0] == 0 for border in accumulate(what.rows[:-1])), node
            merged.setdefault(what.sources, {})[what.part] = what
    # wq_a + wkv and w1 + w3 of every layer, wq_b of the attention and the indexer where there is one.
    layers = opened.config.layers
    assert len(merged) == 2 * len(layers) + sum(layer.kind is LayerKind.CSA for layer in layers)
    for sources, parts in merged.items():
        codes, scales = (load_parameter(opened, parts[part]) for part in ("codes", "scales"))
        block = parts["codes"].block
        assert block is not None
        decoded = decode_weight(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu), *block)
        assert torch.equal(decoded, torch.cat([opened.values(source) for source in sources]))


Operands = dict[str, Any]  # of a dsv4.linear, by the name of its argument


def two(alter: Callable[[Scratch, Operands], None] | None = None) -> GraphModule:
    """Two projections of one input that merge, unless `alter` changes the second."""
    s = Scratch()
    x = s.rows("x", 64)
    a, b = (s.weight(name, rows, 64, encoding=Encoding.BF16) for name, rows in (("a", 6), ("b", 10)))
    second: Operands = {"x": x, "weight": b, "scales": None, "rows": 0, "columns": 0, "dtype": torch.float32}
    if alter is not None:
        alter(s, second)
    flags = second.pop("flags", LaunchFlag(0))
    first = s.call("first", dsv4.linear.default, x, a, None, 0, 0, torch.float32)
    other = s.call("second", dsv4.linear.default, *second.values())
    set_flags(other, flags)
    return s.finish(first, other)


def other_input(s: Scratch, second: Operands) -> None:
    second["x"] = s.rows("other", 64)


def other_dtype(s: Scratch, second: Operands) -> None:
    second["dtype"] = torch.bfloat16


def other_storage(s: Scratch, second: Operands) -> None:
    w = s.weight("c", 10, 64, encoding=Encoding.FP8_BLOCK, block=(128, 128))
    w.meta["val"] = w.meta["val"].to(torch.float8_e4m3fn)
    scales = s.placeholder("c_scales", get_placeholder(w), (1, 1), torch.float8_e8m0fnu)
    second.update(weight=w, scales=scales, rows=128, columns=128)


def runs_for_logits_only(s: Scratch, second: Operands) -> None:
    second["flags"] = LaunchFlag.HEAD


@pytest.mark.parametrize("alter", [other_input, other_dtype, other_storage, runs_for_logits_only])
def test_near_misses_stay(alter: Callable[[Scratch, Operands], None]) -> None:
    gm = two(alter)
    text = format_graph(gm)
    assert not merge_projections(gm, context()).modified
    assert format_graph(gm) == text


def scaled(blocks: list[tuple[int, int]], rows: list[int]) -> GraphModule:
    s = Scratch()
    x, nodes = s.rows("x", 64), []
    for index, (block, count) in enumerate(zip(blocks, rows, strict=True)):
        w = s.weight(f"w{index}", count, 64, encoding=Encoding.FP8_BLOCK, block=block)
        w.meta["val"] = w.meta["val"].to(torch.float8_e4m3fn)
        grid = (-(-count // block[0]), -(-64 // block[1]))
        scales = s.placeholder(f"w{index}_scales", get_placeholder(w), grid, torch.float8_e8m0fnu)
        nodes.append(s.call(f"y{index}", dsv4.linear.default, x, w, scales, *block, torch.float32))
    return s.finish(*nodes)


def test_blocks_shrink_to_what_all_borders_allow() -> None:
    gm = scaled([(128, 32), (32, 32), (64, 32)], [48, 96, 40])
    assert merge_projections(gm, context()).modified
    # gcd of 128, 32, 64 and the borders 48 and 144.
    FileCheck().check("%w0_and_2_more_scales : float8_e8m0fnu[12, 2]").check(
        "dsv4.linear(%x, %w0_and_2_more_codes, %w0_and_2_more_scales, 16, 32, float32)"
    ).run(format_graph(gm))


def test_blocks_of_other_columns_stay_apart() -> None:
    gm = scaled([(128, 32), (128, 64)], [48, 96])
    assert not merge_projections(gm, context()).modified


def test_twice_changes_nothing_more() -> None:
    gm = run_passes(two(), [merge_projections], context())
    text = format_graph(gm)
    FileCheck().run(
        """
        # CHECK: %a_and_1_more : bfloat16[16, 64] = weight codes of a + b (bf16)
        # CHECK: %merged : float32[T, 16] = dsv4.linear(%x, %a_and_1_more, None, 0, 0, float32)
        # CHECK-NEXT: %part : float32[T, 6] = aten.slice(%merged, 1, 0, 6)
        # CHECK-NEXT: %part_1 : float32[T, 10] = aten.slice(%merged, 1, 6, 16)
        # CHECK-NEXT: return [%part, %part_1]
        """,
        text,
    )
    assert not merge_projections(gm, context()).modified
    assert format_graph(gm) == text
