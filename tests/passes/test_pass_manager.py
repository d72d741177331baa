"""The manager cleans up, verifies and dumps after each pass, and names the one that fails."""

from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.errors import PassError
from dsv4c.graph.printer import format_graph
from dsv4c.passes.pass_manager import PassContext, run_passes
from tests.graph.scratch import Scratch
from tests.graph.small_models import context

aten = torch.ops.aten


def small() -> GraphModule:
    s = Scratch()
    x, w = s.rows("x", 4), s.weight("w", 4, 4)
    return s.finish(s.call("y", aten.silu.default, s.call("product", aten.linear.default, x, w)))


def node(gm: GraphModule, name: str) -> torch.fx.Node:
    return next(n for n in gm.graph.nodes if n.name == name)


def leave_it(gm: GraphModule, ctx: PassContext) -> PassResult:
    return PassResult(gm, False)


def drop_the_product(gm: GraphModule, ctx: PassContext) -> PassResult:
    node(gm, "product").replace_all_uses_with(node(gm, "x"))
    return PassResult(gm, True)


def break_a_shape(gm: GraphModule, ctx: PassContext) -> PassResult:
    node(gm, "y").meta["val"] = torch.empty(3)
    return PassResult(gm, True)


def trip(gm: GraphModule, ctx: PassContext) -> PassResult:
    raise AssertionError("no such thing")


def refuse(gm: GraphModule, ctx: PassContext) -> PassResult:
    raise PassError("not this model", hint="take another")


def test_what_a_pass_leaves_unused_goes() -> None:
    gm = run_passes(small(), [drop_the_product], context())
    assert format_graph(gm) == ("%x : float32[T, 4] = input 0\n%y : float32[T, 4] = aten.silu(%x)\nreturn [%y]\n")
    value = torch.tensor([[1.0, -1.0, 0.0, 2.0]])
    # The code of the module is that of the graph.
    assert torch.equal(gm(value)[0], torch.nn.functional.silu(value))


def test_dumps_are_numbered(tmp_path: Path) -> None:
    gm = small()
    before = format_graph(gm)
    run_passes(gm, [leave_it, drop_the_product], context(dump_dir=tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "00-input.txt",
        "01-leave_it.txt",
        "02-drop_the_product.txt",
    ]
    assert (tmp_path / "00-input.txt").read_text() == (tmp_path / "01-leave_it.txt").read_text() == before
    assert (tmp_path / "02-drop_the_product.txt").read_text() == format_graph(gm) != before


@pytest.mark.parametrize(("broken", "what"), [(break_a_shape, "%y "), (trip, "no such thing")])
def test_a_failure_names_the_pass(broken: object, what: str, tmp_path: Path) -> None:
    name = broken.__name__  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match=f"after pass {name}: {what}"):
        run_passes(small(), [leave_it, broken, leave_it], context(dump_dir=tmp_path))  # type: ignore[list-item]
    # The dumps end with the last good graph.
    assert sorted(file.name for file in tmp_path.iterdir()) == ["00-input.txt", "01-leave_it.txt"]


def test_an_unsupported_model_is_no_bug() -> None:
    with pytest.raises(PassError) as error:
        run_passes(small(), [refuse], context())
    assert (error.value.message, error.value.hint) == ("not this model", "take another")
