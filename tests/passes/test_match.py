"""Patterns match the same operators and literals over one binding of their operands, and nothing else."""

from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from dsv4c.passes.match import matches

aten = torch.ops.aten


def written(write: Callable[[Graph], Node | tuple[Node, ...]]) -> tuple[Graph, tuple[Node, ...]]:
    graph = Graph()
    roots = write(graph)
    return graph, roots if isinstance(roots, tuple) else (roots,)


def call(graph: Graph, target: object, *args: object, name: str | None = None, **kwargs: object) -> Node:
    return graph.create_node("call_function", target, args, kwargs, name=name)  # type: ignore[arg-type]


def scaled_difference(graph: Graph) -> Node:
    """(a - b) * a * 2."""
    a, b = graph.placeholder("a"), graph.placeholder("b")
    product = call(graph, aten.mul.Tensor, call(graph, aten.sub.Tensor, a, b), a)
    return call(graph, aten.mul.Tensor, product, 2)


def found(write: Callable[[Graph, Node, Node], Node]) -> list[dict[str, str]]:
    _, roots = written(scaled_difference)
    graph = Graph()
    graph.output(write(graph, graph.placeholder("x"), graph.placeholder("y")))
    return [{p.name: n.name for p, n in bound.items() if p.op == "placeholder"} for bound in matches(graph, roots)]


def test_operands_are_bound() -> None:
    def write(graph: Graph, x: Node, y: Node) -> Node:
        product = call(graph, aten.mul.Tensor, call(graph, aten.sub.Tensor, y, x), y)
        return call(graph, aten.mul.Tensor, product, 2)

    assert found(write) == [{"a": "y", "b": "x"}]


def test_one_operand_may_stand_for_two() -> None:
    def write(graph: Graph, x: Node, y: Node) -> Node:
        product = call(graph, aten.mul.Tensor, call(graph, aten.sub.Tensor, x, x), x)
        return call(graph, aten.mul.Tensor, product, 2)

    assert found(write) == [{"a": "x", "b": "x"}]


def test_near_misses() -> None:
    def inconsistent(graph: Graph, x: Node, y: Node) -> Node:
        product = call(graph, aten.mul.Tensor, call(graph, aten.sub.Tensor, x, y), y)
        return call(graph, aten.mul.Tensor, product, 2)

    def other_literal(graph: Graph, x: Node, y: Node) -> Node:
        product = call(graph, aten.mul.Tensor, call(graph, aten.sub.Tensor, x, y), x)
        return call(graph, aten.mul.Tensor, product, 3)

    def other_operator(graph: Graph, x: Node, y: Node) -> Node:
        product = call(graph, aten.mul.Tensor, call(graph, aten.add.Tensor, x, y), x)
        return call(graph, aten.mul.Tensor, product, 2)

    def more_arguments(graph: Graph, x: Node, y: Node) -> Node:
        product = call(graph, aten.mul.Tensor, call(graph, aten.sub.Tensor, x, y, alpha=2), x)
        return call(graph, aten.mul.Tensor, product, 2)

    for write in (inconsistent, other_literal, other_operator, more_arguments):
        assert found(write) == []


def test_all_results_belong_to_one_binding() -> None:
    def exp_and_two_uses(graph: Graph) -> tuple[Node, Node]:
        a, b = graph.placeholder("a"), graph.placeholder("b")
        exp = call(graph, aten.exp.default, a)
        return call(graph, aten.add.Tensor, exp, b), call(graph, aten.mul.Tensor, exp, b)

    _, roots = written(exp_and_two_uses)
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first, second = call(graph, aten.exp.default, x), call(graph, aten.exp.default, y)
    pair = [call(graph, aten.add.Tensor, first, y), call(graph, aten.mul.Tensor, first, y)]
    # A sum and a product of different operands, and a sum alone.
    call(graph, aten.add.Tensor, second, x)
    call(graph, aten.mul.Tensor, second, y)
    graph.output(tuple(pair))
    assert [[bound[root] for root in roots] for bound in matches(graph, roots)] == [pair]
