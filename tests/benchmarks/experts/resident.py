"""What keeping the router's weights in the L2 cache would gain: the gate's product in front of the experts, with the
same weights in every layer, which may then still be there, and with weights of its own for each layer, which are not.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.benchmarks.experts.check import make_inputs
from tests.benchmarks.experts.driver import Launcher
from tests.benchmarks.experts.manifest import Variant
from tests.benchmarks.experts.program import Layer, Program
from tests.benchmarks.experts.rows import Reporter
from tests.benchmarks.experts.timing import LAUNCHES, Measured, measure, prepare

# Layers of a graph: so many that their routers' weights are more than the cache holds.
LAYERS = 3 * LAUNCHES


def time_resident(report: Reporter, layer: Layer, variant: Variant, tokens: int) -> None:
    program, shape = Program(layer, variant, tokens), layer.shape
    several = [make_inputs(program, "uniform", 77 * tokens + index, outliers=False) for index in range(LAUNCHES)]
    steps = [program.launchers(inputs.routed) for inputs in several]
    x = several[0].x
    routers = torch.randn((LAYERS, shape.experts, shape.hidden), device="cuda").bfloat16()
    logits = torch.empty((tokens, shape.experts), dtype=torch.bfloat16, device="cuda")

    def layers(router_of: Callable[[int], Tensor] | None, with_experts: bool) -> Measured:
        def work() -> None:
            for index in range(LAYERS):
                if router_of is not None:
                    torch.mm(x, router_of(index).T, out=logits)
                if with_experts:
                    _start(steps[index % LAUNCHES])

        measured = prepare(work)
        measured.launches = LAYERS
        return measured

    cases = {
        "experts alone": layers(None, True),
        "router and experts, other weights each time": layers(lambda index: routers[index], True),
        "router and experts, the same weights": layers(lambda index: routers[0], True),
        "router alone, other weights each time": layers(lambda index: routers[index], False),
        "router alone, the same weights": layers(lambda index: routers[0], False),
    }
    measure(report, list(cases.values()))
    for case, measured in cases.items():
        values = {"us_all": measured.us, "spread": measured.spread}
        report.row("resident", variant=variant.name, tokens=tokens, case=case, **values)
    _, cold, warm, cold_alone, warm_alone = cases.values()
    for case, gain in (
        ("gain, where it is left there", cold.us - warm.us),
        ("gain, were it always there", cold_alone.us - warm_alone.us),
    ):
        note = f"of {cold.us:.1f} us a layer, {100 * gain / cold.us:.1f} %"
        report.row("resident", variant=variant.name, tokens=tokens, case=case, us_all=gain, note=note)


def _start(launchers: Sequence[Launcher]) -> None:
    for launch in launchers:
        launch()
