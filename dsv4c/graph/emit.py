"""Adding a node to a graph, with a readable name and the fake tensor of its result."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.weak import WeakTensorKeyDictionary

from dsv4c.graph.annotations import set_flags, set_layer, value_of
from dsv4c.step_abi import LaunchFlag

Target = Any  # an OpOverload or operator.getitem

_RESULTS: dict[Any, Any] = {}  # fake ones, by operator and kind of operands
_KINDS: MutableMapping[torch.Tensor, Any] = WeakTensorKeyDictionary()  # of fake tensors


def fake_result(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fake result of calling `target` on nodes that carry `meta["val"]`."""

    def value(node: Node) -> Any:
        return node.meta["val"]

    return target(*map_arg(args, value), **map_arg(kwargs, value))


def shared_fake_result(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`fake_result`, computed once for each operator and kind of operands: layers and graphs repeat each other.

    Nodes then share fake tensors, which say shapes, dtypes and strides but not which storage is whose.
    """
    key = (target, _kind(args), _kind(kwargs))
    if key not in _RESULTS:
        _RESULTS[key] = fake_result(target, args, kwargs)
    return _RESULTS[key]


def _kind(value: Any) -> Any:
    """What a fake result depends on, as something hashable."""
    if isinstance(value, Node):
        return _kind(value.meta["val"])
    if isinstance(value, torch.Tensor):
        if value not in _KINDS:
            sizes = str(value.shape), str(value.stride()), int(value.storage_offset())
            # Symbols mean something in their own mode only.
            _KINDS[value] = value.dtype, getattr(value, "fake_mode", None), *sizes
        return _KINDS[value]
    if isinstance(value, list | tuple):
        return tuple(_kind(v) for v in value)
    if isinstance(value, dict):
        return tuple((name, _kind(v)) for name, v in sorted(value.items()))
    return type(value), value


class Emitter:
    """Appends calls to one graph (or inserts them at its insertion point), naming them `l<layer>_<name>`."""

    def __init__(
        self,
        graph: Graph,
        layer: int | None = None,
        flags: LaunchFlag = LaunchFlag(0),
    ) -> None:
        self.graph = graph
        self.layer = layer
        self.flags = flags

    def name(self, name: str) -> str:
        return name if self.layer is None else f"l{self.layer}_{name}"

    def call(self, name: str, target: Target, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.create_node("call_function", target, args, kwargs, name=self.name(name))
        node.meta["val"] = shared_fake_result(target, args, kwargs)
        set_layer(node, self.layer)
        set_flags(node, self.flags)
        return node

    def cast(self, name: str, x: Node, dtype: torch.dtype) -> Node:
        """`x` as `dtype`; no node where it is that already."""
        if value_of(x).dtype == dtype:
            return x
        suffix = "f32" if dtype == torch.float32 else "bf16"
        return self.call(f"{name}_{suffix}", torch.ops.aten._to_copy.default, x, dtype=dtype)

    def f32(self, name: str, x: Node) -> Node:
        return self.cast(name, x, torch.float32)
