"""Weights take their stored form bit for bit; activations are rounded where the model was trained so."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import FileCheck

from dsv4c.checkpoint.checkpoint import Checkpoint
from dsv4c.checkpoint.formats import Encoding
from dsv4c.errors import PassError
from dsv4c.graph import ops
from dsv4c.graph.annotations import Parameter, get_placeholder
from dsv4c.graph.interpreter import Oracle
from dsv4c.graph.parameters import load_parameter
from dsv4c.graph.printer import format_graph
from dsv4c.passes.quantize_weights import quantize_weights
from tests.fixtures import Quantization
from tests.graph.scratch import Scratch
from tests.graph.small_models import checkpoint, context, graph, until, walk

dsv4 = torch.ops.dsv4


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """What the files hold, without the reader of dsv4c."""
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_stored(
    loaded: Tensor, what: Parameter, names: list[str], opened: Checkpoint, files: dict[str, Tensor]
) -> None:
    """`loaded` is made of the bytes of the files: codes as they are, a row of scales as often as its block is split."""
    if what.part == "codes":
        assert torch.equal(raw(loaded), torch.cat([raw(files[name]) for name in names])), names
        return
    assert what.block is not None
    parts = loaded.split([-(-rows // what.block[0]) for rows in what.rows])
    for name, part in zip(names, parts, strict=True):
        stored, block = files[name.removesuffix("weight") + "scale"], opened.weights[name].block
        assert block is not None
        for index, row in enumerate(part):
            assert torch.equal(raw(row), raw(stored[index * what.block[0] // block[0]])), name


@pytest.mark.parametrize("quantization", ["none", "fp8", "fp8_fp4"])
def test_codes_and_scales_are_those_of_the_checkpoint(quantization: Quantization) -> None:
    opened = checkpoint("one_layer", quantization)
    files = stored_tensors(opened.path)
    gm = until(graph("one_layer", quantization=quantization), quantize_weights)
    kinds = set()
    for node in gm.graph.nodes:
        if node.op != "placeholder" or not isinstance(what := get_placeholder(node), Parameter):
            continue
        assert what.part in ("codes", "scales")
        kinds.add((what.part, what.encoding))
        loaded = load_parameter(opened, what)
        assert tuple(loaded.shape) == tuple(node.meta["val"].shape)
        for expert in range(max(what.experts, 1)):
            whole = loaded[expert] if what.experts else loaded
            assert_stored(whole, what, what.source_names(expert if what.experts else None), opened, files)
    assert ("codes", Encoding.F32) in kinds
    assert (("scales", Encoding.FP8_BLOCK) in kinds) == (quantization != "none")
    assert (("scales", Encoding.FP4_GROUP) in kinds) == (quantization == "fp8_fp4")


def test_exact_numerics_store_and_round_nothing() -> None:
    for name, quantization in (("narrow", "fp8_fp4"), ("partial_blocks", "fp8")):
        stage = walk(name, "exact", quantization).stages["quantize_weights"]  # type: ignore[arg-type]
        assert "fp8_round" not in stage.after
        # The same values in the same sums.
        assert all(torch.equal(a, b) for a, b in zip(stage.logits_before, stage.logits_after, strict=True))


def test_before_and_after() -> None:
    stage = walk("narrow", "reference", "fp8_fp4").stages["quantize_weights"]
    FileCheck().check("dsv4.linear(%l1_attn_norm, %p_layers_1_attn_wq_a, None, 0, 0, bfloat16)").run(stage.before)
    FileCheck().run(
        """
        # CHECK: %p_layers_1_attn_wq_a_stored_codes : float8_e4m3fn[48, 96] = weight codes of layers.1.attn.wq_a.weight (fp8_block 128x128)
        # CHECK-NEXT: %p_layers_1_attn_wq_a_stored_scales : float8_e8m0fnu[1, 1] = weight scales of layers.1.attn.wq_a.weight
        # CHECK: %p_layers_1_ffn_experts_w13_stored_codes : float4_e2m1fn_x2[5, 128, 48] = weight codes
        # CHECK-NEXT: %p_layers_1_ffn_experts_w13_stored_scales : float8_e8m0fnu[5, 128, 3] = weight scales
        # CHECK: %l1_act_fp8 : bfloat16[T, 96] = dsv4.fp8_round(%l1_attn_norm, 128, 96)
        # CHECK-NEXT: %l1_q_a : bfloat16[T, 48] = dsv4.linear(%l1_act_fp8, %p_layers_1_attn_wq_a_stored_codes, %p_layers_1_attn_wq_a_stored_scales, 128, 128, bfloat16)
        # CHECK: %l1_kv_proj : bfloat16[T, 40] = dsv4.linear(%l1_act_fp8, %p_layers_1_attn_wkv_stored_codes,
        # CHECK: %l1_compress_kv : float32[T, 80] = dsv4.linear(%l1_attn_norm, %p_layers_1_attn_compressor_wkv_stored, None, 0, 0, float32)
        # CHECK: %l1_index_weights : bfloat16[T, 2] = dsv4.linear(%l1_attn_norm,
        # CHECK: %l1_o_a : bfloat16[T, 40] = dsv4.grouped_linear(%l1_o_heads, %p_layers_1_attn_wo_a_stored_codes, %p_layers_1_attn_wo_a_stored_scales, 128, 128, 1)
        # CHECK-NEXT: %l1_act_fp8_2 : bfloat16[T, 40] = dsv4.fp8_round(%l1_o_a, 128, 40)
        # CHECK: %l1_ffn_logits : float32[T, 5] = dsv4.linear(%l1_ffn_norm,
        # CHECK: dsv4.moe_ffn(%l1_ffn_norm, %l1_route_ids, %l1_route_weights, %p_layers_1_ffn_experts_w13_stored_codes, %p_layers_1_ffn_experts_w13_stored_scales, %p_layers_1_ffn_experts_w2_stored_codes, %p_layers_1_ffn_experts_w2_stored_scales, 1, 32, 10.0, 128)
        """,  # noqa: E501
        stage.after,
    )


def test_projections_of_quantised_weights_take_rounded_inputs() -> None:
    opened = checkpoint("one_layer")
    gm = until(graph("one_layer", "reference"), quantize_weights, "reference")
    trace: dict[str, Tensor] = {}
    session = Oracle(gm, opened, 1, 256)
    session.step([3, 1, 4, 1, 5], [0] * 5, list(range(5)), trace=trace)

    def product(x: str, weight: str, rounds: bool) -> Tensor:
        values = opened.values(f"layers.0.{weight}.weight")
        inputs = ops.fp8_rounded(trace[x], 128, trace[x].shape[1]).bfloat16() if rounds else trace[x]
        return inputs.float() @ values.T

    for node, x, weight, rounds in (
        ("l0_q_a", "l0_attn_norm", "attn.wq_a", True),
        ("l0_q_b", "l0_q_latent", "attn.wq_b", True),
        ("l0_index_q_b", "l0_q_latent", "attn.indexer.wq_b", True),
        ("l0_o_a", "l0_o_heads", "attn.wo_a", False),
        ("l0_o_b", "l0_o_a", "attn.wo_b", True),
        ("l0_ffn_logits", "l0_ffn_norm", "ffn.gate", False),
        ("l0_index_kv", "l0_attn_norm", "attn.indexer.compressor.wkv", False),
        ("l0_shared_gate", "l0_ffn_norm", "ffn.shared_experts.w1", True),
        ("l0_shared_down", "l0_swiglu", "ffn.shared_experts.w2", True),
    ):
        wanted = product(x, weight, rounds)
        # One bfloat16 step: sums may run in another order.
        torch.testing.assert_close(trace[node].float(), wanted, rtol=2**-7, atol=1e-4, msg=node)
        if not rounds:
            continue
        # And the rounding is seen: without it, most results differ by more than that.
        other = product(x, weight, False)
        assert float((trace[node].float() - wanted).abs().mean()) < float((trace[node].float() - other).abs().mean())


def test_unquantised_weights_need_no_rounding() -> None:
    stage = walk("partial_blocks", "reference", "bf16").stages["quantize_weights"]
    assert "dsv4.fp8_round(%l1_attn_norm" not in stage.after and "_scales" not in stage.after
    FileCheck().check("%p_layers_1_attn_wq_a_stored : bfloat16[160, 192] = weight codes").run(stage.after)
    assert all(torch.equal(a, b) for a, b in zip(stage.logits_before, stage.logits_after, strict=True))


def experts(block13: tuple[int, int] | None, block2: tuple[int, int] | None, encoding2: Encoding) -> Scratch:
    s = Scratch()
    encoding13 = Encoding.FP8_BLOCK if block13 else Encoding.F32
    w13 = s.weight("w13", 2, 48, 64, encoding=encoding13, block=block13, experts=2)
    w2 = s.weight("w2", 2, 64, 24, encoding=encoding2, block=block2, experts=2)
    x, ids, weights = s.rows("x", 64), s.rows("ids", 1, dtype=torch.int32), s.rows("weights", 1)
    s.call("moe_ffn", dsv4.moe_ffn.default, x, ids, weights, w13, None, w2, None, 0, 0, 1.0, 0)
    return s


def test_the_stacks_of_a_layer_share_one_scale_block() -> None:
    s = experts((24, 128), (128, 128), Encoding.FP8_BLOCK)
    gm = s.finish(next(reversed(s.graph.nodes)))
    assert quantize_weights(gm, context()).modified
    FileCheck().run(
        """
        # CHECK: %w13_stored_scales : float8_e8m0fnu[2, 6, 1] = weight scales of w13.{expert} (fp8_block 8x128, 2
        # CHECK: %w2_stored_scales : float8_e8m0fnu[2, 8, 1] = weight scales of w2.{expert} (fp8_block 8x128, 2 experts)
        # CHECK: %w13_stored_scales, %w2_stored_codes, %w2_stored_scales, 8, 128, 1.0, 0)
        """,
        format_graph(gm),
    )


@pytest.mark.parametrize(
    ("block2", "encoding"), [(None, Encoding.F32), ((24, 32), Encoding.FP8_BLOCK)], ids=["unquantised", "columns"]
)
def test_stacks_that_cannot_share_a_block_are_refused(block2: tuple[int, int] | None, encoding: Encoding) -> None:
    s = experts((24, 128), block2, encoding)
    gm = s.finish(next(reversed(s.graph.nodes)))
    with pytest.raises(PassError, match=r"%moe_ffn: w1/w3 and w2 have scale blocks of \(24, 128\) and "):
        quantize_weights(gm, context())


def test_a_quantised_norm_is_refused() -> None:
    s = Scratch()
    norm = s.weight("layers.0.attn_norm.weight", 64, encoding=Encoding.FP8_BLOCK, block=(128, 128))
    gm = s.finish(s.call("y", dsv4.rms_norm.default, s.rows("x", 64), norm, 1e-6))
    with pytest.raises(PassError, match=r"layers.0.attn_norm.weight is stored as fp8_block"):
        quantize_weights(gm, context())
