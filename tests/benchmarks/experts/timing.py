"""How long a step takes: graphs of 20 launches, each with a routing of its own, replayed one after the other."""

import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.experts.check import Inputs, make_inputs
from tests.benchmarks.experts.manifest import Call, Variant
from tests.benchmarks.experts.program import LIST_NAMES, Layer, Program, load_tool
from tests.benchmarks.experts.records import record_bytes
from tests.benchmarks.experts.rows import Reporter

LAUNCHES = 20
REPLAYS = 11
ROUNDS = 3
_WARM_UP_MS = 250


@dataclass
class Measured:
    """Work that is timed in turns with other work; microseconds of a launch, by round."""

    graph: torch.cuda.CUDAGraph
    before: Callable[[], object]  # in front of every replay, not timed
    rounds: list[float]
    sm_mhz: list[int]
    launches: int = LAUNCHES

    @property
    def us(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Of the rounds, over their median."""
        return (max(self.rounds) - min(self.rounds)) / self.us


def prepare(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> Measured:
    before()
    graph = torch.cuda.CUDAGraph()
    work()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work()
    return Measured(graph, before, [], [])


def measure(report: Reporter, several: Sequence[Measured], rounds: int = ROUNDS) -> None:
    """All of them in every round, in another order each time: what a card does depends on what it did before."""
    order = random.Random(rounds)
    for _ in range(rounds):
        for one in order.sample(several, len(several)):
            _measure_once(one)
            report.alive()


def _measure_once(one: Measured) -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    one.before()
    one.graph.replay()
    end.record()
    torch.cuda.synchronize()
    # The power limit needs a while to be felt.
    for _ in range(max(1, min(200, int(_WARM_UP_MS / begin.elapsed_time(end))))):
        one.before()
        one.graph.replay()
    events = []
    for _ in range(REPLAYS):
        one.before()
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        one.graph.replay()
        pair[1].record()
        events.append(pair)
    one.sm_mhz.append(sm_mhz())  # while they run
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) * 1e3 / one.launches for begin, end in events]
    one.rounds.append(statistics.median(times))


@cache
def _nvml() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001  absent, or of another kind
        return None
    return pynvml


def sm_mhz() -> int:
    """The clock now; 0 where nobody says."""
    if nvml := _nvml():
        return int(nvml.nvmlDeviceGetClockInfo(nvml.nvmlDeviceGetHandleByIndex(0), nvml.NVML_CLOCK_SM))
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return int(found[0]) if found and found[0].isdigit() else 0


def read_bandwidths(folder: Path, tools: Mapping[str, Call]) -> dict[str, float]:
    """Bytes a second: torch's sum, and a plain kernel."""
    call = tools["read_bandwidth"]
    size = int(call.constants["BYTES"])
    data = torch.empty(size // 4, dtype=torch.float32, device="cuda").normal_()
    found = torch.zeros(1, dtype=torch.int32, device="cuda")
    tool = load_tool(folder, call, [data.data_ptr(), found.data_ptr()])
    return {"sum": size / _seconds(data.sum), "kernel": size / _seconds(tool)}


def _seconds(work: Callable[[], object]) -> float:
    times = []
    # A card that has idled needs a while to get to its clock.
    started = time.perf_counter()
    while time.perf_counter() - started < _WARM_UP_MS / 1e3:
        work()
        torch.cuda.synchronize()
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


class Timed:
    """A variant with its graphs: all calls, and the experts' alone."""

    def __init__(self, program: Program, several: Sequence[Inputs]) -> None:
        # The graphs know the addresses of all these alone.
        self._kept = program, several
        self.everything: Measured | None = None
        if program.has_lists:
            launchers = [launch for inputs in several for launch in program.launchers(inputs.routed)]
            self.everything = prepare(lambda: [launch() for launch in launchers])
        self.experts: Measured | None = None
        if program.variant.kind == "several":
            return
        # What the lists' kernel writes, for every launch anew; the rest of the scratch memory is shared, as in a step.
        size = {name: -(-program.region(name).nbytes // 256) * 256 for name in LIST_NAMES}
        self._lists = {
            name: torch.empty((len(several), n), dtype=torch.uint8, device="cuda") for name, n in size.items()
        }
        experts = []
        for index, inputs in enumerate(several):
            own = {name: memory[index] for name, memory in self._lists.items()}
            *before, last = program.launchers(inputs.routed, lists=own)
            for launch in before:
                launch()
            if not before:
                program.fill_lists(program.list_contents(inputs.routing, inputs.x), own)
            experts.append(last)
        counters = self._lists["counters"]
        self.experts = prepare(lambda: [launch() for launch in experts], counters.zero_)


def time_tokens(
    report: Reporter, layer: Layer, variants: Sequence[Variant], tokens: int, case: str, rounds: int = ROUNDS
) -> None:
    """Variants of the same work, in turns."""
    timed, shape = [], layer.shape
    for variant in variants:
        program = Program(layer, variant, tokens)
        several = [make_inputs(program, case, 1000 * tokens + index, outliers=False) for index in range(LAUNCHES)]
        timed.append(Timed(program, several))
        report.alive()
    measure(report, [one for each in timed for one in (each.everything, each.experts) if one], rounds)
    hit = statistics.mean(int(inputs.routing.ids.unique().numel()) for inputs in several)
    size = hit * record_bytes(shape, layer.records.weights)
    flops = 6 * tokens * shape.choices * shape.hidden * shape.inner
    for variant, each in zip(variants, timed, strict=True):
        everything, experts = each.everything, each.experts
        best = everything or experts
        report.row(
            "time",
            variant=variant.name,
            tokens=tokens,
            case=case,
            us_all=everything.us if everything else "",
            us_experts=experts.us if experts else "",
            spread=best.spread,
            experts_hit=hit,
            megabytes=size / 1e6,
            read_share_all=size / everything.us / layer.read * 1e6 if everything else "",
            read_share_experts=size / experts.us / layer.read * 1e6 if experts else "",
            tflop_per_s=flops / best.us / 1e6,
            sm_mhz=best.sm_mhz[-1],
        )
