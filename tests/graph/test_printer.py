"""The text form of a graph."""

import torch
from torch.fx import Graph, GraphModule

from dsv4c.checkpoint.formats import Encoding
from dsv4c.graph.annotations import Constant
from dsv4c.graph.printer import describe_placeholder, format_graph, format_value
from dsv4c.step_abi import Input, StateKind
from tests.graph.scratch import Scratch

aten, dsv4 = torch.ops.aten, torch.ops.dsv4


def test_one_line_a_node() -> None:
    s = Scratch()
    x = s.rows("x", 8)
    w = s.weight("w.weight", 4, 8, encoding=Encoding.FP8_BLOCK, block=(2, 8))
    e = s.weight("experts", 3, 4, 8, encoding=Encoding.BF16, experts=3)
    ring = s.plane("ring", 6, 4)
    freqs = s.placeholder("freqs", Constant((1.0, 0.5)), (2,), torch.float32)
    positions = s.placeholder("positions", Input.POSITIONS, ("T",), torch.int32)
    y = s.call("y", aten.linear.default, x, w)
    half = s.call("half", aten._to_copy.default, y, dtype=torch.bfloat16)
    top = s.call("top", aten.topk.default, y, 2)
    s.call("rope", dsv4.rope.default, half, positions, freqs, False)
    s.call("commit", dsv4.commit_ring.default, y, ring, None, positions, positions, 2)
    joined = s.call("joined", aten.cat.default, [y, y], 1)
    assert format_graph(s.finish(joined, e)) == (
        "%x : float32[T, 8] = input 0\n"
        "%w_weight : float32[4, 8] = weight values of w.weight (fp8_block 2x8)\n"
        "%experts : float32[3, 4, 8] = weight values of experts.{expert} (bf16, 3 experts)\n"
        "%ring : float32[S, 6, 4] = state, 6 rows a slot\n"
        "%freqs : float32[2] = constant of 2\n"
        "%positions : int32[T] = input 2\n"
        "%y : float32[T, 4] = aten.linear(%x, %w_weight)\n"
        "%half : bfloat16[T, 4] = aten._to_copy(%y, dtype=bfloat16)\n"
        "%top : (float32[T, 2], int64[T, 2]) = aten.topk(%y, 2)\n"
        "%rope : bfloat16[T, 4] = dsv4.rope(%half, %positions, %freqs, False)\n"
        "%commit : () = dsv4.commit_ring(%y, %ring, None, %positions, %positions, 2)\n"
        "%joined : float32[T, 8] = aten.cat([%y, %y], 1)\n"
        "return [%joined, %experts]\n"
    )
    assert top.name == "top"


def test_a_graph_without_annotations_prints_too() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.relu, (x,)))
    text = format_graph(GraphModule(torch.nn.Module(), graph))
    assert text == "%x : () = placeholder\n%relu : () = relu(%x)\nreturn %relu\n"


def test_values() -> None:
    assert format_value(torch.empty(2, 0, dtype=torch.uint8), {}) == "uint8[2, 0]"
    assert format_value((torch.empty(1), None), {}) == "(float32[1], ())"
    assert describe_placeholder(Input.MASK) == f"input {int(Input.MASK)}"
    assert StateKind.BLOCK.name.lower() == "block"
