"""Targets: features are asked for, unknown names are answered with the nearest one."""

import pytest

from dsv4c.errors import PlanError, RecipeError
from dsv4c.target import COMING_TARGETS, TARGETS, Feature, find_target


def test_targets_are_found_by_name() -> None:
    assert list(TARGETS) == ["cpu", "h100"]
    for name, target in TARGETS.items():
        assert find_target(name) is target and target.name == name


def test_kernels_are_compiled_for_products_with_a_known_number_of_sms() -> None:
    for target in TARGETS.values():
        assert (Feature.CUDA in target.features) == bool(target.sm_counts) == bool(target.smem_per_block)


def test_require_names_the_target_and_the_use() -> None:
    with pytest.raises(PlanError, match=r"FP8 expert GEMM needs FP8 tensor-core operands, which target 'cpu'"):
        find_target("cpu").require(Feature.FP8_MMA, "FP8 expert GEMM")


def test_unknown_target_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="unknown target 'cpus'") as raised:
        find_target("cpus")
    assert raised.value.hint is not None and raised.value.hint.startswith("did you mean 'cpu'?")


@pytest.mark.parametrize("name", COMING_TARGETS)
def test_coming_target_is_not_called_unknown(name: str) -> None:
    with pytest.raises(RecipeError, match="cannot be built yet"):
        find_target(name)


@pytest.mark.parametrize("name", ["h200", "H200", "hopper", "H100"])
def test_other_names_of_a_machine_lead_to_its_target(name: str) -> None:
    with pytest.raises(RecipeError) as raised:
        find_target(name)
    assert "h100" in (raised.value.hint or "")
