"""The graph that is compiled to Python late: called, changed and called again."""

import torch
from torch.fx import Graph

from dsv4c.graph.step_module import StepModule


def test_code_follows_the_graph() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(torch.add, (x, x))
    graph.output((doubled,))
    gm = StepModule(torch.nn.Module(), graph)
    other = StepModule(torch.nn.Module(), graph)
    assert "forward" not in vars(type(gm))
    assert gm(torch.tensor(3.0)) == (torch.tensor(6.0),)
    for _ in range(2):
        doubled.target = torch.mul
        gm.recompile()
        assert "forward" not in vars(type(gm)) and "forward" not in vars(type(other))
        assert gm(torch.tensor(3.0)) == (torch.tensor(9.0),)
        assert gm(torch.tensor(4.0)) == (torch.tensor(16.0),)
