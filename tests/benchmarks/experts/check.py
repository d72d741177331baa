"""Whether the results are right, complete and the same every time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.benchmarks.experts.driver import Launcher
from tests.benchmarks.experts.manifest import Variant
from tests.benchmarks.experts.program import GUARD_BYTES, LIST_NAMES, POISON, Layer, Program, poisoned
from tests.benchmarks.experts.reference import expected
from tests.benchmarks.experts.routing import (
    Routing,
    hot_ranks,
    logits_for,
    route,
    same_ranks,
    uniform_ranks,
)
from tests.benchmarks.experts.rows import Reporter

CASES = {"uniform": uniform_ranks, "same experts": same_ranks, "hot expert": hot_ranks}
VOCABULARY = 4096
BESIDE = 8192  # rows of the matrix product beside
# Sums in float32 move some products across a boundary of bf16 and then of e4m3, whose steps are 6 to 12 %: about 1e-3
# in all. One pair in a wrong place would be 0.4 of its row, one column 0.02.
TOLERANCE, ROW_TOLERANCE, ELEMENT_TOLERANCE = 3e-3, 1.5e-2, 0.1


@dataclass(frozen=True)
class Inputs:
    """Of a step: x, what is routed by, and what that routing is."""

    x: Tensor
    routed: dict[str, Tensor]
    routing: Routing


def make_inputs(program: Program, case: str, seed: int, outliers: bool = True) -> Inputs:
    """With outliers a few rows of x are large, so that the clamps are reached."""
    shape, variant, tokens = program.shape, program.variant, program.tokens
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn((tokens, shape.hidden), generator=generator, device="cuda")
    if outliers:
        x[2::7] *= 8
    x = x.bfloat16()
    bias = program.bias
    logits = logits_for(CASES[case](tokens, shape.experts, generator), bias)
    routed = {"logits": program.capacity(logits)}
    hashed = None
    if variant.routing == "hash":
        keys = torch.rand((VOCABULARY, shape.experts), generator=generator, device="cuda")
        table = keys.topk(shape.choices, 1).indices
        ids = torch.randint(0, VOCABULARY, (tokens,), generator=generator, device="cuda", dtype=torch.int32)
        hashed = table[ids.long()]
        routed |= {"table": table, "token_ids": program.capacity(ids)}
    program.set_x(x)
    return Inputs(x, routed, route(shape, logits, bias, hashed))


class Runs:
    """A step that can be run again and again in memory of its own."""

    def __init__(self, program: Program, inputs: Inputs) -> None:
        self.program = program
        self.scratch = poisoned(program.variant.scratch_bytes)
        self.out = poisoned(program.out.nbytes - GUARD_BYTES)
        self.launchers: list[Launcher] = program.launchers(
            inputs.routed, self.scratch, self.out, header=program.header.clone()
        )
        self._regions = {name: program.region(name, self.scratch) for name in LIST_NAMES}
        self._contents = None if program.has_lists else program.list_contents(inputs.routing, inputs.x)

    def start(self) -> None:
        """The operator's calls; where the lists have no kernel, torch writes them."""
        if self._contents is not None:
            self.program.fill_lists(self._contents, self._regions)
        for launch in self.launchers:
            launch()

    def poison(self) -> None:
        self.scratch.fill_(POISON)
        self.out.fill_(POISON)


def check_variant(report: Reporter, layer: Layer, variant: Variant, tokens: int, case: str) -> None:
    program, shape = Program(layer, variant, tokens), layer.shape
    inputs = make_inputs(program, case, seed=tokens + 1)
    runs = Runs(program, inputs)
    runs.poison()
    runs.start()
    torch.cuda.synchronize()
    notes = []
    result = program.result(runs.out)
    if not bool(torch.isfinite(result[:tokens]).all()):
        notes.append(f"{int((~torch.isfinite(result[:tokens])).sum())} results are not finite")
    if bool((runs.out[tokens * shape.hidden * 4 :] != POISON).any()):
        notes.append("wrote behind the rows of the step")
    if bool((runs.scratch[variant.scratch_bytes :] != POISON).any()):
        notes.append("wrote behind the scratch memory")
    values = {}
    if tokens:
        reference = expected(layer.records, inputs.x, inputs.routing)
        values = _errors(result[:tokens].double(), reference)
        limits = zip(values.items(), (TOLERANCE, ROW_TOLERANCE, ELEMENT_TOLERANCE), strict=True)
        notes += [f"{name} is {value:.2g}" for (name, value), limit in limits if not value < limit]
        if program.has_lists:
            notes += check_lists(program, inputs)
    hit = int(inputs.routing.ids.unique().numel()) if tokens else 0
    report.row(
        "check",
        variant=variant.name,
        tokens=tokens,
        case=case,
        experts_hit=hit,
        note="; ".join(notes) or "ok",
        **values,
    )


def _errors(found: Tensor, reference: Tensor) -> dict[str, float]:
    """Of everything, of the worst row, and of the worst element in units of its row."""
    error = found - reference
    by_row = reference.norm(dim=1)
    return {
        "relative_error": float(error.norm() / reference.norm()),
        "row_error": float((error.norm(dim=1) / by_row).max()),
        "max_error": float((error.abs().amax(1) / by_row).max() * reference.shape[1] ** 0.5),
    }


def check_lists(program: Program, inputs: Inputs) -> list[str]:
    """What the lists' kernel writes, against torch."""
    runs = Runs(program, inputs)
    for launch in runs.launchers[:-1]:
        launch()
    torch.cuda.synchronize()
    notes = []
    for name, values in program.list_contents(inputs.routing, inputs.x).items():
        found = program.region(name, runs.scratch)[: values.nbytes].view(values.dtype).view(values.shape)
        if name == "pair_weights":
            if not torch.allclose(found, values, rtol=1e-5):
                notes.append(f"pair_weights off by {float((found - values).abs().max()):.2g}")
        elif not torch.equal(found.view(torch.uint8), values.contiguous().view(torch.uint8)):
            notes.append(f"{name}: {int((found.view(torch.uint8) != values.view(torch.uint8)).sum())} bytes differ")
    places = int(program.region("heads", runs.scratch)[4 * program.variant.groups :][:4].view(torch.int32))
    counters = program.region("counters", runs.scratch).view(torch.int32)
    most = program.region("places").nbytes // 16
    # Behind those of the places: of rows and panels; or of strips of 256 columns and groups, and of places once more.
    strips, groups = -(-program.shape.hidden // 256), program.variant.groups
    more = {"experts_grouped": strips + groups, "experts_prefill": most + strips + 2 * groups}
    rows = more.get(program.variant.kernel, program.tokens * program.shape.hidden // 64)
    if bool(counters[: max(0, min(places, most))].any()) or bool(counters[most : most + rows].any()):
        notes.append("counters are not zero")
    return notes


def check_repeats(report: Reporter, layer: Layer, variant: Variant, tokens: int, repeats: int) -> None:
    """The same bits, alone and beside other work."""
    program = Program(layer, variant, tokens)
    inputs = make_inputs(program, "uniform", seed=tokens + 2)
    first, second = Runs(program, inputs), Runs(program, inputs)
    first.poison()
    first.start()
    torch.cuda.synchronize()
    wanted = first.out.clone()

    def differing(runs: Sequence[Runs], work: Callable[[], None], times: int) -> int:
        found = 0
        for _ in range(times):
            for one in runs:
                one.poison()
            torch.cuda.synchronize()
            work()
            torch.cuda.synchronize()
            found += sum(not torch.equal(one.out, wanted) for one in runs)
            report.alive()
        return found

    def row(case: str, count: int, times: int) -> None:
        report.row(
            "repeat",
            variant=variant.name,
            tokens=tokens,
            case=case,
            note="ok" if count == 0 else f"{count} of {times} differ",
        )

    row("alone", differing([first], first.start, repeats), repeats)
    # Matrix products that start before the step and go on during it.
    beside = torch.randn((BESIDE, BESIDE), device="cuda").bfloat16()
    side = torch.cuda.Stream()

    def with_product() -> None:
        with torch.cuda.stream(side):
            beside @ beside
        for _ in range(8):
            first.start()

    row("beside a matrix product", differing([first], with_product, repeats // 5), repeats // 5)
    if not program.has_lists:
        return  # torch's writes would keep the two apart
    graphs = [capture(lambda runs=runs: [runs.start() for _ in range(10)]) for runs in (first, second)]
    other = torch.cuda.Stream()

    def two_graphs() -> None:
        for _ in range(3):
            graphs[0].replay()
            with torch.cuda.stream(other):
                graphs[1].replay()

    row("two graphs at once", differing([first, second], two_graphs, repeats // 5), 2 * (repeats // 5))

    def all_at_once() -> None:
        with torch.cuda.stream(side):
            beside @ beside
        two_graphs()

    row("two graphs and a product", differing([first, second], all_at_once, repeats // 10), 2 * (repeats // 10))


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
