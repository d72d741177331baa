"""The batched gather of the chosen experts becomes one operator; what differs in a number or an axis does not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.testing import FileCheck

from dsv4c.graph import moe
from dsv4c.graph.printer import format_graph
from dsv4c.passes.fuse_expert_ffn import fuse_expert_ffn
from tests.fixtures import config_of
from tests.graph.scratch import Scratch
from tests.graph.small_models import CONFIGS, context, max_difference, walk

CONFIG = config_of(CONFIGS["one_layer"])
E, K, D = CONFIG.n_routed_experts, CONFIG.num_experts_per_tok, CONFIG.hidden_size
INNER = CONFIG.moe_intermediate_size
LIMIT = CONFIG.swiglu_limit


def experts(dtype: torch.dtype = torch.float32) -> tuple[GraphModule, dict[str, Node]]:
    s = Scratch()
    x, ids, weights = s.rows("x", D, dtype=dtype), s.rows("ids", K, dtype=torch.int64), s.rows("weights", K)
    w13, w2 = s.weight("w13", E, 2 * INNER, D, experts=E), s.weight("w2", E, D, INNER, experts=E)
    other_ids = s.rows("other_ids", K, dtype=torch.int64)
    routed = moe.routed_experts(s, x, ids, weights, w13, w2, CONFIG, dtype)
    gm = s.finish(routed)
    return gm, {node.name: node for node in gm.graph.nodes} | {"other_ids": other_ids}


def values(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    ids = torch.tensor([[0, 1], [4, 0], [1, 0]])
    return [draw(3, D).to(dtype), ids, draw(3, K).abs(), draw(E, 2 * INNER, D), draw(E, D, INNER), ids]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_before_and_after(dtype: torch.dtype) -> None:
    gm, _ = experts(dtype)
    before = gm(*values(dtype))[0]
    assert fuse_expert_ffn(gm, context()).modified
    gm.graph.eliminate_dead_code()
    gm.recompile()
    FileCheck().run(
        """
        # CHECK: %other_ids
        # CHECK-NEXT: %moe_ffn : float32[T, 96] = dsv4.moe_ffn(%x, %ids, %weights, %w13, None, %w2, None, 0, 0, 10.0, 0)
        # CHECK-NEXT: return [%moe_ffn]
        """,
        format_graph(gm),
    )
    # Sums run in another order; with bf16, one rounding of the product may then fall on the other side.
    spread = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(gm(*values(dtype))[0], before, rtol=1e-5, atol=spread * float(before.std()))
    assert not fuse_expert_ffn(gm, context()).modified


def other_limit(n: dict[str, Node]) -> None:
    n["ffn_up_clamped"].args = (n["ffn_up"], -7.0, 7.0)


def one_sided_clamp(n: dict[str, Node]) -> None:
    n["ffn_up_clamped"].args = (n["ffn_up"], -LIMIT)


def lopsided_clamp(n: dict[str, Node]) -> None:
    n["ffn_up_clamped"].args = (n["ffn_up"], -1.0, LIMIT)


def unclamped_gate(n: dict[str, Node]) -> None:
    n["ffn_silu"].args = (n["ffn_gate"],)


def unclamped_up(n: dict[str, Node]) -> None:
    n["ffn_act"].args = (n["ffn_silu"], n["ffn_up"])


def swapped_halves(n: dict[str, Node]) -> None:
    n["ffn_gate_clamped"].args, n["ffn_up_clamped"].args = (n["ffn_up"], LIMIT), (n["ffn_gate"], -LIMIT, LIMIT)


def uneven_halves(n: dict[str, Node]) -> None:
    source = n["ffn_gate_up"]
    n["ffn_gate"].args, n["ffn_up"].args = (source, 2, 0, INNER - 2), (source, 2, INNER - 2, 2 * INNER)


def overlapping_halves(n: dict[str, Node]) -> None:
    n["ffn_up"].args = (n["ffn_gate_up"], 2, 0, INNER)


def other_axis(n: dict[str, Node]) -> None:
    n["ffn_routed"].args = (n["ffn_parts"], [2])


def kept_axis(n: dict[str, Node]) -> None:
    n["ffn_routed"].args = (n["ffn_parts"], [1], True)


def two_choices(n: dict[str, Node]) -> None:
    n["ffn_w2"].args = (n["w2"], [n["other_ids"]])


def no_silu(n: dict[str, Node]) -> None:
    n["ffn_act"].args = (n["ffn_gate_clamped"], n["ffn_up_clamped"])


MISSES = [
    *(other_limit, one_sided_clamp, lopsided_clamp, unclamped_gate, unclamped_up, swapped_halves, uneven_halves),
    *(overlapping_halves, other_axis, kept_axis, two_choices, no_silu),
]


@pytest.mark.parametrize("alter", MISSES)
def test_near_misses_stay(alter: Callable[[dict[str, Node]], None]) -> None:
    gm, nodes = experts()
    alter(nodes)
    text = format_graph(gm)
    assert not fuse_expert_ffn(gm, context()).modified
    assert format_graph(gm) == text


def test_a_product_that_is_not_rounded_to_the_input_stays() -> None:
    """The operator rounds the product to the dtype of x; a graph that keeps it in float32 says something else."""
    gm, nodes = experts(torch.bfloat16)
    nodes["ffn_h_column"].replace_input_with(nodes["ffn_h_f32"], nodes["ffn_weighted"])
    assert not fuse_expert_ffn(gm, context()).modified


@pytest.mark.parametrize("numerics", ["exact", "reference"])
def test_on_the_model(numerics: str) -> None:
    stage = walk("narrow", numerics, "fp8_fp4").stages["fuse_expert_ffn"]  # type: ignore[arg-type]
    FileCheck().check("aten.index(%p_layers_1_ffn_experts_w13, [%l1_ffn_ids])").run(stage.before)
    FileCheck().check_not("aten.index(%p_layers_1_ffn_experts").run(stage.after)
    FileCheck().check("%l2_moe_ffn : float32[T, 96] = dsv4.moe_ffn(%l2_ffn_norm").run(stage.after)
    assert max_difference(stage.logits_before, stage.logits_after) <= (1e-4 if numerics == "exact" else 0.1)
