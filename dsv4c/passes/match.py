"""Matching a pattern graph against a graph.

A pattern is written with the same functions that build the model, on a small graph of its own; its placeholders match
anything. Operators and literal arguments must be equal.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import Graph, Node

Binding = dict[Node, Node]  # pattern node -> graph node


def match_node(pattern: Node, node: Node, bound: Binding) -> bool:
    """Whether `node` computes `pattern`, given what is bound already; extends `bound`, also where it fails."""
    if pattern in bound:
        return bound[pattern] is node
    if pattern.op != "placeholder":
        if node.op != "call_function" or node.target is not pattern.target:
            return False
        if not _match_args(pattern.args, node.args, bound) or not _match_args(pattern.kwargs, node.kwargs, bound):
            return False
    bound[pattern] = node
    return True


def _match_args(pattern: Any, found: Any, bound: Binding) -> bool:
    if isinstance(pattern, Node):
        return isinstance(found, Node) and match_node(pattern, found, bound)
    if isinstance(pattern, list | tuple):
        return (
            isinstance(found, list | tuple)
            and len(pattern) == len(found)
            and all(_match_args(p, f, bound) for p, f in zip(pattern, found, strict=True))
        )
    if isinstance(pattern, dict):
        return (
            isinstance(found, dict)
            and pattern.keys() == found.keys()
            and all(_match_args(pattern[key], found[key], bound) for key in pattern)
        )
    return bool(pattern == found)


def matches(graph: Graph, roots: Sequence[Node]) -> Iterator[Binding]:
    """Every place where all of `roots` (the pattern's results) are found over one binding of its placeholders.

    The first root is looked for everywhere, the others among the nodes that follow from what it bound. Put the root
    that reaches most of the pattern first.
    """
    for node in list(graph.nodes):
        bound: Binding = {}
        if node.op == "call_function" and match_node(roots[0], node, bound) and _match_rest(roots[1:], bound):
            yield bound


def _match_rest(roots: Sequence[Node], bound: Binding) -> bool:
    return all(_find(root, bound) for root in roots)


def _find(root: Node, bound: Binding) -> bool:
    if root in bound:
        return True
    for candidate in _descendants(root, bound):
        attempt = dict(bound)
        if match_node(root, candidate, attempt):
            bound.update(attempt)
            return True
    return False


def _descendants(root: Node, bound: Binding) -> Iterator[Node]:
    """Graph nodes reached from the bound inputs of `root` by as many steps as the pattern takes, nearest first."""
    depth = _depth(root, bound)
    frontier = {node for pattern, node in bound.items() if pattern.op != "placeholder"} or set(bound.values())
    for _ in range(depth):
        frontier = {user for node in frontier for user in node.users}
        yield from sorted((n for n in frontier if n.target is root.target), key=lambda n: n.name)


def _depth(root: Node, bound: Binding) -> int:
    inputs = [node for node in root.all_input_nodes if node not in bound and node.op != "placeholder"]
    return 1 + max((_depth(node, bound) for node in inputs), default=0)
