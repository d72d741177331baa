"""Launches and tensors: what every view becomes, and what is refused."""

import math
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node

from dsv4c.errors import PlanError
from dsv4c.passes.plan_state import plan_state
from dsv4c.plan.execution_plan import DENSE, DTYPES, ExecutionPlan, Launch, TensorRef
from dsv4c.plan.lowering import lower_graph
from dsv4c.plan.memory import ALIGNMENT
from dsv4c.step_abi import BucketKind, Dim, DType, Input, LaunchFlag, Output, Space
from tests.graph.scratch import Scratch
from tests.graph.small_models import WALKS, context, plan

aten, dsv4 = torch.ops.aten, torch.ops.dsv4
TOKENS = 5


def lowered(gm: GraphModule) -> ExecutionPlan:
    plan_state(gm, context())
    return lower_graph(gm, (), (TOKENS,), 8)


def operand(view: Callable[[Scratch, Node], Node], *shape: int) -> tuple[TensorRef, TensorRef]:
    """(the result of a launch of rows of `shape`, what the next launch sees of it through `view`)."""
    s = Scratch()
    made = s.call("made", dsv4.rms_norm.default, s.rows("x", *shape), None, 1e-6)
    used = s.call("used", dsv4.rms_norm.default, view(s, made), None, 1e-6)
    rows = s.placeholder("logits_rows", Input.LOGITS_ROWS, ("R",), torch.int32)
    flat = s.call("flat", aten.reshape.default, used, [-1, math.prod(map(int, used.meta["val"].shape[1:]))])
    logits, sampled = (s.call(name, dsv4.gather_rows.default, flat, rows) for name in ("logits", "sampled"))
    launches = lowered(s.finish(logits, sampled)).buckets[0].launches
    made_at, seen = launches[0].outputs[0], launches[1].args[0]
    assert isinstance(seen, TensorRef) and seen.space is Space.ARENA
    return made_at, seen


def reshaped(s: Scratch, x: Node) -> Node:
    return s.call("view", aten.reshape.default, x, [-1, 3, 4])


def sliced(s: Scratch, x: Node) -> Node:
    return s.call("view", aten.slice.Tensor, x, 1, 5, 9)


def sliced_twice(s: Scratch, x: Node) -> Node:
    return s.call("view", aten.slice.Tensor, s.call("first", aten.slice.Tensor, x, 1, 2, 12), 1, 3, 7)


def sliced_then_split(s: Scratch, x: Node) -> Node:
    return s.call("view", aten.reshape.default, s.call("first", aten.slice.Tensor, x, 1, 4, 10), [-1, 2, 3])


def every_other(s: Scratch, x: Node) -> Node:
    return s.call("view", aten.slice.Tensor, s.call("cubes", aten.reshape.default, x, [-1, 4, 3]), 1, 0, 4, 2)


def widened(s: Scratch, x: Node) -> Node:
    return s.call("view", aten.unsqueeze.default, x, 1)


def broadcast(s: Scratch, x: Node) -> Node:
    return s.call("view", aten.expand.default, s.call("wide", aten.unsqueeze.default, x, 1), [-1, 3, -1])


@pytest.mark.parametrize(
    ("view", "offset", "sizes", "strides"),
    [
        (reshaped, 0, (TOKENS, 3, 4), (12, 4, 1)),
        (sliced, 5, (TOKENS, 4), (12, 1)),
        (sliced_twice, 5, (TOKENS, 4), (12, 1)),
        (sliced_then_split, 4, (TOKENS, 2, 3), (12, 3, 1)),
        (every_other, 0, (TOKENS, 2, 3), (12, 6, 1)),
        (widened, 0, (TOKENS, 1, 12), (12, 12, 1)),
        (broadcast, 0, (TOKENS, 3, 12), (12, 0, 1)),
    ],
)
def test_views_become_strides(
    view: Callable[[Scratch, Node], Node], offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    made, seen = operand(view, 12)
    assert (seen.sizes, seen.strides) == (sizes, strides)
    assert seen.offset == made.offset + 4 * offset
    assert seen.dims == (Dim.TOKENS,) + (Dim.FIXED,) * (len(sizes) - 1)


def columns_merged(s: Scratch, x: Node) -> Node:
    return s.call("view", aten.reshape.default, s.call("part", aten.slice.Tensor, x, 2, 0, 2), [-1, 6])


def test_a_view_that_needs_a_copy_is_refused() -> None:
    with pytest.raises(PlanError, match=r"%view \(aten.reshape\) needs a copy: its source is not contiguous"):
        operand(columns_merged, 3, 4)


def test_a_leftover_aten_node_is_refused() -> None:
    s = Scratch()
    y = s.call("y", aten.silu.default, s.rows("x", 4))
    with pytest.raises(PlanError, match=r"no kernel for %y = aten.silu\(...\)") as error:
        lowered(s.finish(y, y))
    assert error.value.hint is not None and "dsv4c/passes/README.md" in error.value.hint


def test_a_size_that_is_no_symbol_is_refused() -> None:
    s = Scratch()
    flat = s.call("flat", aten.reshape.default, s.call("x2", dsv4.hadamard.default, s.rows("x", 4)), [-1])
    y = s.call("y", dsv4.rms_norm.default, flat, None, 1e-6)
    with pytest.raises(PlanError, match=r"a kernel would see a size of 4\*"):
        lowered(s.finish(y, y))


@pytest.fixture(scope="module")
def reference() -> ExecutionPlan:
    return plan("narrow", "reference")


def launch(reference: ExecutionPlan, name: str, bucket: int = -1) -> Launch:
    return next(launch for launch in reference.buckets[bucket].launches if launch.name == name)


def test_arguments_follow_the_schema(reference: ExecutionPlan) -> None:
    dtypes = {code.value: dtype for dtype, code in DTYPES.items()}
    for bucket in reference.buckets:
        for each in bucket.launches:
            schema = getattr(dsv4, each.kernel).default._schema
            assert len(each.args) == len(schema.arguments) and len(each.outputs) == len(schema.returns)
            for arg, declared in zip(each.args, schema.arguments, strict=True):
                kind = str(declared.type)
                expected = {"Tensor": TensorRef, "float": float}.get(kind, int)
                if kind == "Optional[Tensor]":
                    assert arg is None or isinstance(arg, TensorRef), (each.name, declared.name)
                else:
                    assert type(arg) is expected, (each.name, declared.name, arg)
                if str(declared.real_type) == "ScalarType":
                    assert dtypes[arg] in (torch.float32, torch.bfloat16)  # type: ignore[index]


def test_inputs_state_outputs_and_flags(reference: ExecutionPlan) -> None:
    sample = launch(reference, "sampled")
    assert [arg.index for arg in sample.args[1:] if isinstance(arg, TensorRef)] == [
        *(Input.LOGITS_ROWS, Input.POSITIONS, Input.TEMPERATURE, Input.TOP_K, Input.TOP_P, Input.SEED, Input.MASK)
    ]
    assert sample.flags == LaunchFlag.HEAD | LaunchFlag.SAMPLE
    logits, sampled = launch(reference, "logits").outputs[0], sample.outputs[0]
    assert (logits.space, logits.index, logits.sizes, logits.dims[0]) == (Space.OUTPUT, 0, (32, 97), Dim.LOGITS)
    assert (sampled.space, sampled.index, sampled.dtype) == (Space.OUTPUT, Output.SAMPLED, DType.I32)
    assert sample.args[0] == logits
    attention = launch(reference, "l1_attention")
    ring, table = attention.args[2], attention.args[10]
    assert isinstance(ring, TensorRef) and isinstance(table, TensorRef)
    assert reference.state.planes[ring.index].name == "s_l1_ring_packed"
    assert (ring.space, ring.dims[0], ring.sizes, ring.strides) == (
        Space.STATE,
        Dim.SLOTS,
        (0, 28, 48),
        (28 * 48, 48, 1),
    )
    # The one stride that depends on a size of the session.
    assert (table.dims, table.strides) == ((Dim.SLOTS, Dim.TABLE), (DENSE, 1))
    assert attention.layer == 1 and launch(reference, "embedded").layer is None


def test_expert_stacks_stride_over_whole_experts(reference: ExecutionPlan) -> None:
    stacks = [arg for arg in launch(reference, "l1_moe_ffn").args[3:7] if isinstance(arg, TensorRef)]
    # w1, w3, their scales, w2, its scales: 6144 + 384 + 3072 + 192 bytes, in pages.
    assert [stack.strides[0] * stack.dtype.size_bytes for stack in stacks] == [12288] * 4
    assert [stack.offset - stacks[0].offset for stack in stacks] == [0, 6144, 6528, 9600]
    assert stacks[0].offset % 4096 == 0


@pytest.mark.parametrize(("name", "numerics", "quantization"), WALKS[:2])
def test_buckets(name: str, numerics: str, quantization: str) -> None:
    made = plan(name, numerics, quantization)  # type: ignore[arg-type]
    assert [(bucket.kind, bucket.tokens) for bucket in made.buckets] == [
        (BucketKind.DECODE, 1),
        (BucketKind.DECODE, 4),
        (BucketKind.MIXED, 32),
    ]
    names = [[each.name for each in bucket.launches] for bucket in made.buckets]
    assert names[0] == names[1] == names[2]
    sizes = [bucket.arena_bytes for bucket in made.buckets]
    assert sizes == sorted(sizes)
    for bucket in made.buckets:
        # Reuse is worth it: less than half of the buffers side by side.
        assert 0 < bucket.arena_bytes < bucket.unshared_bytes / 2
        for each in bucket.launches:
            for tensor in (*each.args, *each.outputs):
                if isinstance(tensor, TensorRef) and tensor.space is Space.ARENA:
                    reach = sum((n - 1) * step for n, step in zip(tensor.sizes, tensor.strides, strict=True)) + 1
                    assert tensor.offset + reach * tensor.dtype.size_bytes <= bucket.arena_bytes
                    assert tensor.sizes[0] == bucket.tokens
            assert all(tensor.offset % ALIGNMENT == 0 for tensor in each.outputs)
