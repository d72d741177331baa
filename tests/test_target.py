"""Targets: features are asked for, unknown names are answered with the nearest one."""

import pytest

from dsv4c.errors import PlanError, RecipeError
from dsv4c.target import COMING_TARGETS, TARGETS, Feature, find_target


def test_cpu_is_the_only_target_so_far() -> None:
    assert list(TARGETS) == ["cpu"]
    assert find_target("cpu") is TARGETS["cpu"]


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
