"""The registry against the runtime's own list, and a plan that needs what a target lacks."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4c.errors import KernelError
from dsv4c.graph.annotations import StateLayout
from dsv4c.graph.builder import OPERATOR_MODULES
from dsv4c.kernels.registry import KERNELS, require_kernels
from dsv4c.plan.execution_plan import BucketPlan, EntryPoint, ExecutionPlan, Launch, WeightLayout
from dsv4c.step_abi import BucketKind, LaunchFlag
from dsv4c.target import TARGETS

ROOT = Path(__file__).parent.parent.parent


def test_cpu_list_is_the_runtimes() -> None:
    source = (ROOT / "dsv4c/runtime/src/cpu/registry.cc").read_text()
    assert set(re.findall(r'\{"(\w+)", cpu::\1\}', source)) == KERNELS["cpu"]


def test_every_kernel_is_an_operator() -> None:
    assert OPERATOR_MODULES
    for names in KERNELS.values():
        for name in names:
            assert hasattr(torch.ops.dsv4, name)


def test_every_target_has_kernels() -> None:
    assert {target.arch for target in TARGETS.values()} <= set(KERNELS)


def test_a_missing_kernel_is_named_with_its_launch() -> None:
    def launch(kernel: str) -> Launch:
        return Launch(kernel, f"l3_{kernel}", 3, LaunchFlag(0), (), (), 0, 0)

    bucket = BucketPlan(BucketKind.DECODE, 1, (launch("linear"), launch("teleport")), 0, 0)
    plan = ExecutionPlan(
        (EntryPoint("main", (bucket,)),), WeightLayout((), 0), StateLayout(()), 1, 1, 1, 1, 1, 0, None, ()
    )
    with pytest.raises(KernelError, match=r"cpu has no kernel for teleport \(%l3_teleport\)"):
        require_kernels(plan, TARGETS["cpu"])
    fine = replace(plan, entry_points=(EntryPoint("main", (replace(bucket, launches=(launch("linear"),)),)),))
    require_kernels(fine, TARGETS["cpu"])
