"""The graph that the builder writes: what it says of itself, and the nodes of each kind of layer."""

from dataclasses import replace

import pytest
import torch
from torch.testing import FileCheck

from dsv4c.checkpoint.config import LayerConfig, LayerKind
from dsv4c.checkpoint.formats import Encoding
from dsv4c.errors import GraphError
from dsv4c.graph.annotations import (
    Constant,
    Parameter,
    StatePlane,
    get_flags,
    get_info,
    get_layer,
    get_placeholder,
    value_of,
)
from dsv4c.graph.builder import block_tokens, build_graph
from dsv4c.graph.printer import format_graph
from dsv4c.graph.verifier import verify_graph
from dsv4c.step_abi import Input, LaunchFlag
from tests.fixtures import config_of, tiny_config_json
from tests.graph.small_models import ROLLBACK_ROWS, checkpoint, graph


@pytest.fixture(scope="module")
def exact() -> str:
    return format_graph(graph("narrow"))


@pytest.fixture(scope="module")
def reference() -> str:
    return format_graph(graph("narrow", "reference"))


def test_info_and_symbols() -> None:
    gm = graph("one_layer", "reference")
    verify_graph(gm)
    info = get_info(gm)
    assert info.config == checkpoint("one_layer").config
    assert (info.numerics, info.block_tokens) == ("reference", 256)
    assert sorted(info.symbols.values()) == ["B", "M", "R", "S", "T"]
    values = {node.name: node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"}
    named = {str(size): info.symbols[str(size)] for size in values["block_table"].shape}
    assert list(named.values()) == ["S", "M"]


def test_placeholders_say_what_they_stand_for() -> None:
    opened = checkpoint("narrow")
    gm = graph("narrow")
    found = {node: get_placeholder(node) for node in gm.graph.nodes if node.op == "placeholder"}
    assert [what for what in found.values() if isinstance(what, Input)] == list(Input)
    sources = [name for what in found.values() if isinstance(what, Parameter) for name in what.source_names()]
    # Every weight of the model, each once.
    assert sorted(sources) == sorted(opened.weights)
    for node, what in found.items():
        if isinstance(what, Parameter):
            assert what.part == "values" and sum(what.rows) == value_of(node).shape[1 if what.experts else 0]
            first = opened.weights[what.source_names()[0]]
            assert what.encoding is first.encoding and (what.block is None) == (first.block is None)
            assert value_of(node).dtype == (torch.int64 if what.encoding is Encoding.INT64 else torch.float32)
        if isinstance(what, StatePlane):
            assert get_layer(node) is not None
        if isinstance(what, Constant):
            assert value_of(node).shape == (len(what.values),)
    assert all(get_layer(node) is None for node in found if node.name.startswith(("p_embed", "p_hc_head", "p_norm")))


def test_scales_of_stacked_experts_do_not_straddle() -> None:
    # 64 rows of w1, then 64 of w3, in FP8 blocks of 128 rows: 64 is the largest block that fits both.
    gm = graph("narrow", quantization="fp8")
    stacks = [get_placeholder(node) for node in gm.graph.nodes if node.name.endswith("_experts_w13")]
    assert len(stacks) == 3
    for what in stacks:
        assert isinstance(what, Parameter)
        assert (what.rows, what.block, what.experts) == ((64, 64), (64, 128), 5)
        assert what.source_names(3)[0].endswith("ffn.experts.3.w1.weight")


def test_window_layer(exact: str) -> None:
    FileCheck().check_not("l2_compress").check_not("l2_index").check_not("s_l2_entries").run(exact)
    FileCheck().run(
        """
        # CHECK: %s_l2_ring : float32[S, 28, 40] = state, 28 rows a slot
        # CHECK: %l2_q_a : float32[T, 48] = aten.linear(%l2_attn_norm, %p_layers_2_attn_wq_a)
        # CHECK-NEXT: %l2_q_latent : float32[T, 48] = aten.rms_norm(%l2_q_a, [48], %p_layers_2_attn_q_norm, 1e-06)
        # CHECK-NEXT: %l2_q_b : float32[T, 160] = aten.linear(%l2_q_latent, %p_layers_2_attn_wq_b)
        # CHECK-NEXT: %l2_q_heads : float32[T, 4, 40] = aten.reshape(%l2_q_b, [-1, 4, 40])
        # CHECK-NEXT: %l2_q_normed : float32[T, 4, 40] = aten.rms_norm(%l2_q_heads, [40], None, 1e-06)
        # CHECK-NEXT: %l2_q : float32[T, 4, 40] = dsv4.rope(%l2_q_normed, %positions, %c_rope_window, False)
        # CHECK: %l2_kv : float32[T, 40] = dsv4.rope(%l2_kv_normed, %positions, %c_rope_window, False)
        # CHECK-NEXT: %l2_attention : float32[T, 4, 40] = dsv4.attention(%l2_q, %l2_kv, %s_l2_ring, None, None, None, None, %p_layers_2_attn_attn_sink, %slots, %positions, %block_table, 20, 1, 8,
        # CHECK-NEXT: %l2_commit : () = dsv4.commit_ring(%l2_kv, %s_l2_ring, None, %slots, %positions, 8)
        # CHECK-NEXT: %l2_unrotated : float32[T, 4, 40] = dsv4.rope(%l2_attention, %positions, %c_rope_window, True)
        # CHECK: %l2_o_a : float32[T, 40] = dsv4.grouped_linear(%l2_o_heads, %p_layers_2_attn_wo_a, None, 0, 0, 1)
        # CHECK-NEXT: %l2_o_b : float32[T, 96] = aten.linear(%l2_o_a, %p_layers_2_attn_wo_b)
        """,  # noqa: E501
        exact,
    )


def test_hca_layer_pools_groups_and_reads_all_of_them(exact: str) -> None:
    FileCheck().check_not("l0_index").check_not("l0_selected").run(exact)
    FileCheck().run(
        """
        # CHECK: %s_l0_compress_groups : float32[S, 16, 2, 40] = state, 16 rows a slot
        # CHECK: %s_l0_entries : float32[B, 32, 40] = state, 32 rows a block
        # CHECK: %l0_compress_kv : float32[T, 40] = aten.linear(
        # CHECK-NEXT: %l0_compress_gate : float32[T, 40] = aten.linear(
        # CHECK-NEXT: %l0_compress_update : () = dsv4.compress(%l0_compress_kv, %l0_compress_gate, %p_layers_0_attn_compressor_ape, %p_layers_0_attn_compressor_norm, %c_rope_compress, %slots, %positions, %block_table, %s_l0_compress_groups, %s_l0_entries, None, 8, False, 1e-06, 0, float32)
        # CHECK-NEXT: %l0_attention : float32[T, 4, 40] = dsv4.attention(%l0_q, %l0_kv, %s_l0_ring, None, %s_l0_entries, None, None,
        """,  # noqa: E501
        exact,
    )


def test_csa_layer_overlaps_groups_and_selects(exact: str) -> None:
    FileCheck().run(
        """
        # CHECK: %s_l1_compress_groups : float32[S, 16, 2, 80] = state, 16 rows a slot
        # CHECK: %s_l1_entries : float32[B, 64, 40] = state, 64 rows a block
        # CHECK: %s_l1_index_groups : float32[S, 16, 2, 32] = state, 16 rows a slot
        # CHECK: %s_l1_index_keys : float32[B, 64, 16] = state, 64 rows a block
        # CHECK: %l1_compress_update : () = dsv4.compress(
        # CHECK-SAME: %s_l1_entries, None, 4, True, 1e-06, 0, float32)
        # CHECK: %l1_index_update : () = dsv4.compress(
        # CHECK-SAME: %s_l1_index_groups, %s_l1_index_keys, None, 4, True, 1e-06, 0, float32)
        # CHECK-NEXT: %l1_index_q_b : float32[T, 32] = aten.linear(%l1_q_latent, %p_layers_1_attn_indexer_wq_b)
        # CHECK: %l1_index_q : float32[T, 2, 16] = dsv4.rope(%l1_index_q_heads, %positions, %c_rope_compress, False)
        # CHECK-NEXT: %l1_index_weights : float32[T, 2] = aten.linear(
        # CHECK-NEXT: %l1_selected : int32[T, 3] = dsv4.select_entries(%l1_index_q, %l1_index_weights, %s_l1_index_keys, None, %slots, %positions, %block_table, 3, 4,
        # CHECK-NEXT: %l1_attention : float32[T, 4, 40] = dsv4.attention(%l1_q, %l1_kv, %s_l1_ring, None, %s_l1_entries, None, %l1_selected,
        """,  # noqa: E501
        exact,
    )


def test_routers(exact: str) -> None:
    """`narrow` hashes its first layer."""
    FileCheck().run(
        """
        # CHECK: %p_layers_0_ffn_gate_tid2eid : int64[97, 2] = weight values of layers.0.ffn.gate.tid2eid (int64)
        # CHECK: %l0_ffn_ids : int64[T, 2] = aten.index(%p_layers_0_ffn_gate_tid2eid, [%token_ids])
        # CHECK: %l1_ffn_biased : float32[T, 5] = aten.add(%l1_ffn_scores, %p_layers_1_ffn_gate_bias)
        # CHECK-NEXT: %l1_ffn_top : (float32[T, 2], int64[T, 2]) = aten.topk(%l1_ffn_biased, 2)
        # CHECK: %l1_ffn_chosen : float32[T, 2] = aten.gather(%l1_ffn_scores, 1, %l1_ffn_ids)
        """,
        exact,
    )
    FileCheck().check_not("p_layers_0_ffn_gate_bias").check_not("p_layers_1_ffn_gate_tid2eid").run(exact)


def test_head_and_sampling(exact: str) -> None:
    FileCheck().run(
        """
        # CHECK: %head_streams : float32[R, 2, 96] = aten.index_select(%l2_hc_ffn_out, 0, %logits_rows)
        # CHECK: %logits : float32[R, 97] = aten.linear(%head_norm, %p_head)
        # CHECK-NEXT: %sampled : int32[R] = dsv4.sample(%logits, %logits_rows, %positions, %temperature, %top_k, %top_p, %seed, %mask)
        # CHECK-NEXT: return [%logits, %sampled]
        """,  # noqa: E501
        exact,
    )
    nodes = {node.name: node for node in graph("one_window").graph.nodes}
    assert get_flags(nodes["logits"]) == LaunchFlag.HEAD
    assert get_flags(nodes["sampled"]) == LaunchFlag.HEAD | LaunchFlag.SAMPLE
    assert get_flags(nodes["l0_attention"]) == LaunchFlag(0)


def test_only_reference_numerics_round(exact: str, reference: str) -> None:
    for rounding in ("bfloat16", "dsv4.fp8_round", "dsv4.fp4_round", "dsv4.hadamard"):
        assert rounding not in exact
    FileCheck().run(
        """
        # CHECK: %s_l1_ring : bfloat16[S, 28, 40]
        # CHECK: %s_l1_compress_groups : float32[S, 16, 2, 80]
        # CHECK: %l1_q_latent_bf16 : bfloat16[T, 48] = aten._to_copy(%l1_q_latent, dtype=bfloat16)
        # CHECK: %l1_kv : bfloat16[T, 40] = dsv4.rope(
        # CHECK-NEXT: %l1_kv_fp8 : bfloat16[T, 40] = dsv4.fp8_round(%l1_kv, 64, 32)
        # CHECK: %l1_compress_update : () = dsv4.compress(
        # CHECK-SAME: 4, True, 1e-06, 1, bfloat16)
        # CHECK: %l1_index_update : () = dsv4.compress(
        # CHECK-SAME: 4, True, 1e-06, 2, bfloat16)
        # CHECK: %l1_index_q_hadamard : bfloat16[T, 2, 16] = dsv4.hadamard(%l1_index_q)
        # CHECK-NEXT: %l1_index_q_fp4 : bfloat16[T, 2, 16] = dsv4.fp4_round(%l1_index_q_hadamard, 32)
        # CHECK: dsv4.attention(%l1_q, %l1_kv_fp8, %s_l1_ring
        # CHECK-NEXT: dsv4.commit_ring(%l1_kv_fp8, %s_l1_ring
        # CHECK: %logits : float32[R, 97] = aten.linear(
        """,
        reference,
    )


@pytest.mark.parametrize(
    ("ratios", "expected"), [([0, 4, 128], 256), ([4, 24], 768), ([0, 0], 256), ([3, 5], 3840), ([512], 512)]
)
def test_block_tokens_hold_whole_groups_of_every_layer(ratios: list[int], expected: int) -> None:
    config = config_of(tiny_config_json())
    layers = tuple(LayerConfig(LayerKind.HCA if ratio else LayerKind.WINDOW, ratio, False) for ratio in ratios)
    assert block_tokens(replace(config, layers=layers)) == expected


def test_the_hadamard_of_reference_numerics_needs_a_power_of_two() -> None:
    opened = checkpoint("one_layer")
    config = replace(opened.config, index_head_dim=24)
    with pytest.raises(GraphError, match="`index_head_dim` is 24") as error:
        build_graph(config, opened.weights, "reference", ROLLBACK_ROWS)
    assert error.value.hint == 'build with `numerics = "exact"`'
    build_graph(config, opened.weights, "exact", ROLLBACK_ROWS)
    # A model without an indexer has no such transform.
    window = checkpoint("one_window")
    build_graph(replace(window.config, index_head_dim=24), window.weights, "reference", ROLLBACK_ROWS)


def test_experts_of_one_layer_need_one_format() -> None:
    opened = checkpoint("one_layer")
    name = "layers.0.ffn.experts.2.w1.weight"
    other = replace(opened.weights[name], encoding=Encoding.BF16, block=None, scales=None)
    with pytest.raises(GraphError, match=r"experts\.\{expert\}\.w1\.weight.*\(bf16, fp4_group\)"):
        build_graph(opened.config, {**opened.weights, name: other}, "exact", ROLLBACK_ROWS)
