"""The cache takes the form it was rounded to; not one bit of the logits changes."""

from dataclasses import replace

import pytest
import torch
from torch.testing import FileCheck

from dsv4c.errors import PassError
from dsv4c.graph.annotations import StatePlane, get_placeholder
from dsv4c.graph.printer import format_graph
from dsv4c.passes.insert_fp8_kv import insert_fp8_kv
from dsv4c.passes.pass_manager import PassContext, run_passes
from dsv4c.recipe import IndexKeyEncoding, KvEncoding
from tests.graph.small_models import WALKS, checkpoint, context, graph, schedule_logits, walk


@pytest.mark.parametrize(("name", "numerics", "quantization"), [walk for walk in WALKS if walk[1] == "reference"])
def test_bit_for_bit(name: str, numerics: str, quantization: str) -> None:
    stage = walk(name, numerics, quantization).stages["insert_fp8_kv"]  # type: ignore[arg-type]
    assert stage.modified
    assert all(torch.equal(a, b) for a, b in zip(stage.logits_before, stage.logits_after, strict=True))


def test_before_and_after() -> None:
    stage = walk("partial_blocks", "reference", "fp8_fp4").stages["insert_fp8_kv"]
    FileCheck().run(
        """
        # CHECK: %s_l1_ring : bfloat16[S, 56, 96]
        # CHECK: %s_l1_entries : bfloat16[B, 192, 96]
        # CHECK: %s_l1_index_keys : bfloat16[B, 192, 64]
        """,
        stage.before,
    )
    # 64 e4m3 codes and 32 bf16 channels; one exponent, padded to 8. Keys: 64 codes of 4 bits, two exponents.
    FileCheck().run(
        """
        # CHECK: %s_l1_ring_packed : uint8[S, 56, 128] = state, 56 rows a slot
        # CHECK-NEXT: %s_l1_ring_exponents : uint8[S, 56, 8] = state, 56 rows a slot
        # CHECK: %s_l1_compress_groups : float32[S, 16, 2, 192]
        # CHECK: %s_l1_entries_packed : uint8[B, 192, 128] = state, 192 rows a block
        # CHECK-NEXT: %s_l1_entries_exponents : uint8[B, 192, 8] = state, 192 rows a block
        # CHECK: %s_l1_index_keys_packed : float4_e2m1fn_x2[B, 192, 32] = state, 192 rows a block
        # CHECK-NEXT: %s_l1_index_keys_exponents : uint8[B, 192, 2] = state, 192 rows a block
        # CHECK: %l1_compress_update : () = dsv4.compress(
        # CHECK-SAME: %s_l1_compress_groups, %s_l1_entries_packed, %s_l1_entries_exponents, 4, True,
        # CHECK: %l1_index_update : () = dsv4.compress(
        # CHECK-SAME: %s_l1_index_groups, %s_l1_index_keys_packed, %s_l1_index_keys_exponents, 4, True,
        # CHECK: dsv4.select_entries(%l1_index_q_fp4, %l1_index_weights, %s_l1_index_keys_packed, %s_l1_index_keys_exponents,
        # CHECK: dsv4.attention(%l1_q, %l1_kv_fp8, %s_l1_ring_packed, %s_l1_ring_exponents, %s_l1_entries_packed, %s_l1_entries_exponents, %l1_selected,
        # CHECK-NEXT: dsv4.commit_ring(%l1_kv_fp8, %s_l1_ring_packed, %s_l1_ring_exponents,
        """,  # noqa: E501
        stage.after,
    )


def encoded(kv: KvEncoding, index_keys: IndexKeyEncoding) -> PassContext:
    ctx = context("reference")
    return replace(ctx, recipe=replace(ctx.recipe, kv=kv, index_keys=index_keys))


@pytest.mark.parametrize(
    ("kv", "index_keys", "ring", "keys"),
    [
        ("fp8", "f32", "%s_l0_ring_packed : uint8[S, 28, 48]", "%s_l0_index_keys : bfloat16[B, 64, 16]"),
        ("f32", "fp4", "%s_l0_ring : bfloat16[S, 28, 40]", "%s_l0_index_keys_packed : float4_e2m1fn_x2[B, 64, 8]"),
        ("f32", "fp8", "%s_l0_ring : bfloat16[S, 28, 40]", "%s_l0_index_keys_packed : float8_e4m3fn[B, 64, 16]"),
        ("fp8", "fp8", "%s_l0_ring_packed : uint8[S, 28, 48]", "%s_l0_index_keys_packed : float8_e4m3fn[B, 64, 16]"),
    ],
)
def test_each_plane_follows_the_recipe(kv: KvEncoding, index_keys: IndexKeyEncoding, ring: str, keys: str) -> None:
    opened = checkpoint("one_layer")
    gm = graph("one_layer", "reference")
    before = schedule_logits(gm, opened)
    gm = run_passes(gm, [insert_fp8_kv], encoded(kv, index_keys))
    FileCheck().check(ring).check(keys).run(format_graph(gm))
    assert all(torch.equal(a, b) for a, b in zip(before, schedule_logits(gm, opened), strict=True))


def test_nothing_asked_nothing_done() -> None:
    gm = graph("one_layer", "reference")
    text = format_graph(gm)
    assert not insert_fp8_kv(gm, encoded("f32", "f32")).modified
    assert format_graph(gm) == text
    # A window model has no index keys to store.
    window = graph("one_window", "reference")
    assert not insert_fp8_kv(window, encoded("f32", "fp4")).modified


def test_open_groups_stay_float32() -> None:
    gm = walk("narrow", "reference", "fp8_fp4").gm
    planes = [n for n in gm.graph.nodes if n.op == "placeholder" and isinstance(get_placeholder(n), StatePlane)]
    groups = {node.meta["val"].dtype for node in planes if node.name.endswith("_groups")}
    assert groups == {torch.float32}
    assert {node.meta["val"].dtype for node in planes if not node.name.endswith("_groups")} == {
        torch.uint8,
        torch.float4_e2m1fn_x2,
    }


def test_exact_numerics_are_refused() -> None:
    gm = graph("one_layer")
    with pytest.raises(PassError, match="would change the exact numerics"):
        insert_fp8_kv(gm, context("reference"))
