"""Which operator runs on which shape, and how often in a step."""

import math
from collections import Counter
from dataclasses import dataclass

from dsv4c.graph.annotations import Parameter
from dsv4c.graph.parameters import PACKED
from dsv4c.plan.execution_plan import Launch, TensorRef
from dsv4c.planning.layers import LAYER_NAME, ModelPlan
from dsv4c.step_abi import Dim, Space

_SYMBOLS = {Dim.TOKENS: "T", Dim.LOGITS: "R", Dim.SLOTS: "S", Dim.BLOCKS: "B", Dim.TABLE: "M"}


@dataclass(frozen=True)
class KernelUse:
    """An operator on one shape: `count` launches a step.

    `weights` names the tensors it reads by leaf; `shape` is that of the largest one ([out, in], experts first), or of
    the result where it reads none, with T for the rows of the step and R for those that want logits.
    """

    kernel: str
    weights: str
    shape: str
    format: str
    count: int


def kernel_uses(plan: ModelPlan) -> list[KernelUse]:
    """The launches of a step of the first bucket, those that are alike counted together."""
    uses: Counter[tuple[str, str, str, str]] = Counter()
    for launch in plan.reduced.buckets[0].launches:
        uses[launch.kernel, *_operand(plan, launch)] += plan.count(launch.layer)
    return [KernelUse(*key, count) for key, count in sorted(uses.items())]


def _operand(plan: ModelPlan, launch: Launch) -> tuple[str, str, str]:
    """(weights, shape, format) of a launch."""
    read: list[tuple[TensorRef, Parameter]] = []
    for arg in launch.args:
        if isinstance(arg, TensorRef) and arg.space is Space.WEIGHT:
            what = plan.extents_by_offset[arg.offset].what
            if isinstance(what, Parameter) and what.part != "scales":
                read.append((arg, what))
    if not read:
        tensors = (ref for ref in (*launch.outputs, *launch.args) if isinstance(ref, TensorRef))
        shown = next(tensors)
        return "", _shape(shown, 1), shown.dtype.name.lower()
    ref, largest = max(read, key=lambda pair: math.prod(pair[0].sizes))
    shape = _shape(ref, 2 if largest.stored_as in PACKED else 1)
    if largest.part == "packed":
        # As of the first stack before it was packed.
        inner, _, hidden = largest.rows
        shape = f"[{largest.experts}, {2 * inner}, {hidden}]"
    names = [_leaf(source) for _, what in read for source in what.sources]
    return ", ".join(names), shape, largest.stored_as.value


def _shape(ref: TensorRef, packed: int) -> str:
    """`packed` values lie in each element of the last dimension."""
    sizes = [_SYMBOLS.get(dim, str(size)) for dim, size in zip(ref.dims, ref.sizes, strict=True)]
    if packed > 1:
        sizes[-1] = str(ref.sizes[-1] * packed)
    return f"[{', '.join(sizes)}]"


def _leaf(source: str) -> str:
    """`layers.3.attn.wq_a.weight` -> `attn.wq_a`."""
    match = LAYER_NAME.fullmatch(source)
    return (match[2] if match else source).removesuffix(".weight").replace(".{expert}", "")
