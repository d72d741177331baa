"""Budgets of routed experts: blocks against an SM, weights against the L2 cache, and the refusal to keep them there."""

import pytest

from dsv4c.errors import RecipeError
from dsv4c.planning.engine_budget import budget_lines, engine_budgets
from dsv4c.planning.expert_budget import (
    SM_LIMITS,
    BlockBudget,
    RoutedExperts,
    kernel_budgets,
    l2_text,
    require_l2_resident,
)
from dsv4c.planning.targets import PLAN_TARGETS
from tests.topology_view.placed_engine import manifest_of

HOPPER = SM_LIMITS["sm_90a"]
# 3 x 4,096 x 2,048 weights of 4 bits, a scale byte for 32.
FLASH = RoutedExperts(count=43, size_bytes=256 * 13_369_344, experts=256, per_token=6)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "block_registers", "blocks"),
    [
        (672, 90, 129_536, 64_512, 1),  # 21 warps of 96 registers
        (672, 97, 129_536, 69_888, 0),
        (256, 64, 0, 16_384, 4),
        (256, 32, 0, 8_192, 8),
        (32, 8, 0, 256, 32),
        (33, 8, 0, 512, 32),
        (128, 32, 227 << 10, 4_096, 1),
        (128, 32, (227 << 10) + 1, 4_096, 0),
        (128, 32, 113 << 10, 4_096, 2),  # 1 KiB more is kept for each
        (128, None, 56 << 10, None, 4),
    ],
)
def test_blocks_of_an_sm(
    threads: int, registers: int | None, shared: int, block_registers: int | None, blocks: int
) -> None:
    budget = BlockBudget("k", threads, registers, shared)
    assert budget.block_registers == block_registers
    assert budget.blocks_per_sm(HOPPER) == blocks


def test_registers_that_a_thread_can_have() -> None:
    for threads, most in ((672, 96), (384, 168), (1024, 64), (128, 255)):
        assert BlockBudget("k", threads, None, 0).most_registers(HOPPER) == most
        if most < 255:
            assert BlockBudget("k", threads, most, 0).blocks_per_sm(HOPPER) == 1
            assert BlockBudget("k", threads, most + 1, 0).blocks_per_sm(HOPPER) == 0


def test_text() -> None:
    text = BlockBudget("k", 672, 90, 129_536).to_text(HOPPER)
    assert text == (
        "672 threads, 90 registers each: 64,512 of 65,536 (98%); shared memory 129,536 of 232,448 bytes (56%); "
        "1 block an SM"
    )
    assert "at most 96 registers each for 65,536" in BlockBudget("k", 672, None, 0).to_text(HOPPER)


def test_weights_of_flash() -> None:
    assert FLASH.one_bytes == 13_369_344
    assert FLASH.hit_bytes(1) == pytest.approx(6 * 13_369_344)
    assert FLASH.hit_bytes(10_000) == pytest.approx(FLASH.size_bytes)


@pytest.mark.parametrize(("target", "l2"), [("h100", "52.43 MB (50 MiB)"), ("h200", "62.91 MB (60 MiB)")])
def test_experts_of_flash_do_not_stay_in_l2(target: str, l2: str) -> None:
    card = PLAN_TARGETS[target]
    with pytest.raises(RecipeError) as refused:
        require_l2_resident([FLASH], card.l2_bytes, card.product)
    message = refused.value.message
    for number in ("one expert is 13.37 MB", "the 256 of a layer 3.42 GB", "43 layers 147.17 GB", f"the cache is {l2}"):
        assert number in message
    assert card.product in message and refused.value.hint and "leave `experts.l2_resident` out" in refused.value.hint


def test_experts_that_fit_by_themselves() -> None:
    half = 25 << 20
    fitting = RoutedExperts(2, half // 2, 16, 2)
    note = require_l2_resident([fitting], 50 << 20, "a card")
    assert "by themselves" in note and "adds nothing" in note
    # All layers count, and two copies.
    with pytest.raises(RecipeError, match="they do not fit"):
        require_l2_resident([fitting, RoutedExperts(1, 16, 16, 2)], 50 << 20, "a card")


def test_nothing_to_decide() -> None:
    with pytest.raises(RecipeError, match="the L2 cache of a machine is not known"):
        require_l2_resident([FLASH], None, "a machine")
    with pytest.raises(RecipeError, match="no routed experts"):
        require_l2_resident([], 50 << 20, "a machine")


def test_of_an_engine() -> None:
    manifest, _ = manifest_of("striped")
    other = {**manifest["machine_code"][0], "operator": "linear", "entry": "linear"}
    (budget,) = kernel_budgets([*manifest["machine_code"], other])
    # The largest variant.
    assert budget == BlockBudget("experts_stream", 672, 90, 129_536)
    budgets = engine_budgets(manifest)
    assert budgets is not None
    assert budgets["weights"]["layer_bytes"] == 64 * 835_584 and budgets["weights"]["total_bytes"] == 4 * 64 * 835_584
    assert set(budgets["l2_bytes"]) == {"H100 SXM 80 GB", "H200 SXM 141 GB"}
    text = "\n".join(budget_lines(budgets))
    assert "  experts_stream     672 threads" in text and "one expert  835.58 kB" in text and l2_text(50 << 20) in text


def test_of_an_engine_without_packed_experts() -> None:
    manifest, _ = manifest_of("striped")
    budgets = engine_budgets({**manifest, "experts": None})
    assert budgets is not None and budgets["weights"] is None and len(budget_lines(budgets)) == 2
    assert engine_budgets({**manifest, "arch": "cpu"}) is None
