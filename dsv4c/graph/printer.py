"""The one text form of a graph: dumps, goldens and tests all use it.

    %latent : float32[T, 128] = aten.rms_norm(%q_a, [128], %p_q_norm, 1e-06)

Sizes that only the run knows print as T, R, S, B, M.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsv4c.graph.annotations import Constant, Parameter, Placeholder, StatePlane


def format_graph(gm: GraphModule) -> str:
    """One line a node, in order; placeholders with what they stand for."""
    info = gm.meta.get("dsv4_info")
    symbols = info.symbols if info else {}
    return "\n".join(_line(node, symbols) for node in gm.graph.nodes) + "\n"


def _line(node: Node, symbols: dict[str, str]) -> str:
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    head = f"%{node.name} : {format_value(node.meta.get('val'), symbols)}"
    if node.op == "placeholder":
        return f"{head} = {describe_placeholder(node.meta.get('dsv4_placeholder'))}"
    arguments = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    return f"{head} = {target_name(node.target)}({', '.join(arguments)})"


def target_name(target: Any) -> str:
    """`dsv4.linear` for torch.ops.dsv4.linear.default; an overload other than the default is not shown."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}"
    return str(getattr(target, "__name__", target))


def format_value(value: Any, symbols: dict[str, str]) -> str:
    """`float32[T, 64]`; several results in parentheses; `()` for none."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(symbols.get(str(size), str(size)) for size in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
    if value is None:
        return "()"
    return f"({', '.join(format_value(v, symbols) for v in value)})"


def _argument(value: Any) -> str:
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_argument(v) for v in value)}]"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return repr(value)


def describe_placeholder(what: Placeholder | None) -> str:
    """What a placeholder stands for, in a few words."""
    if what is None:
        return "placeholder"
    if isinstance(what, Parameter):
        stored = what.stored_as.value + ("" if what.block is None else f" {what.block[0]}x{what.block[1]}")
        stored += "" if what.quantization is None else f" made of {what.encoding.value}"
        stack = f", {what.experts} experts" if what.experts else ""
        return f"weight {what.part} of {' + '.join(what.sources)} ({stored}{stack})"
    if isinstance(what, Constant):
        kind = "" if what.dtype.is_floating_point else " integers"
        return f"constant of {len(what.values)}{kind}"
    if isinstance(what, StatePlane):
        return f"state, {what.rows} rows a {what.kind.unit}"
    return f"input {int(what)}"
