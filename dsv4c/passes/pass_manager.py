"""Runs passes over one graph: after each it cleans up, verifies and dumps. A failure names the pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.graph.printer import format_graph
from dsv4c.graph.verifier import verify_graph
from dsv4c.recipe import Recipe
from dsv4c.target import Target


@dataclass(frozen=True)
class PassContext:
    """All that a pass may read besides the graph."""

    target: Target
    recipe: Recipe
    dump_dir: Path | None = None


Pass = Callable[[GraphModule, PassContext], PassResult]


def run_passes(gm: GraphModule, passes: Sequence[Pass], ctx: PassContext) -> GraphModule:
    """Run `passes` in order. With `ctx.dump_dir`, writes `00-input.txt`, then one numbered file a pass."""
    _dump(gm, 0, "input", ctx)
    for number, run in enumerate(passes, start=1):
        name = run.__name__
        try:
            result = run(gm, ctx)
            gm = result.graph_module
            if result.modified:
                gm.graph.eliminate_dead_code()
                _drop_unused_placeholders(gm)
            verify_graph(gm)
        except AssertionError as error:
            raise AssertionError(f"after pass {name}: {error}") from error
        _dump(gm, number, name, ctx)
    gm.recompile()
    return gm


def _drop_unused_placeholders(gm: GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if node.op == "placeholder" and not node.users:
            gm.graph.erase_node(node)


def _dump(gm: GraphModule, number: int, name: str, ctx: PassContext) -> None:
    if ctx.dump_dir is not None:
        (ctx.dump_dir / f"{number:02}-{name}.txt").write_text(format_graph(gm))
