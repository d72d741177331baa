"""`dsv4c bench`: tokens per second of an engine, and where the time of a step goes.

`share` is bytes moved over time, against the read bandwidth of this machine measured in the same run. Bytes are those
of the plan (weights and activations once, state as far as it is read); a launch whose data stays in the caches can
therefore have a share above 1. The bandwidth of a GPU is not measured here: there is no share, and bytes over time is
shown instead.
"""

import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dsv4c.runtime.engine import Engine
from dsv4c.runtime.session import Sampling, Session
from dsv4c.runtime.trace import LaunchTime

# Larger than the last-level cache of a server processor.
_BANDWIDTH_BYTES = 1 << 29
_BANDWIDTH_PASSES = 6
BANDWIDTH_METHOD = "best of 6 sums of 512 MiB by numpy, in as many threads as the engine uses"
# Steps that are run before those that count: they touch the weights and start the threads.
_WARM_UP_STEPS = 2
_PROFILED_PREFILLS = 3


def read_bandwidth(threads: int) -> float:
    """Bytes a second that this machine reads from memory."""
    buffer = np.ones(_BANDWIDTH_BYTES // 8, np.uint64)
    parts = np.array_split(buffer, threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_BANDWIDTH_PASSES):
            started = time.perf_counter()
            list(pool.map(np.sum, parts))  # numpy lets other threads run meanwhile
            seconds.append(time.perf_counter() - started)
    return _BANDWIDTH_BYTES / min(seconds)


def processor_name() -> str:
    """The processor's name where Linux gives one, and how many of them."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x{len(names)}" if names else platform.machine()


def device_name(engine: Engine) -> str:
    """What runs the engine: the GPU, or this machine's processor."""
    return engine.info.device or processor_name()


def benchmark_prompt(length: int, vocab_size: int) -> list[int]:
    """Token ids spread over the vocabulary: experts are hit as by text of all kinds."""
    return [(7919 * index + 3) % vocab_size for index in range(length)]


@dataclass(frozen=True)
class Speed:
    """One row of `dsv4c bench`: prompts prefilled slot after slot, then all slots decoded together, greedily.

    p50 and p99 are of a decode step, which gives every slot one token.
    """

    device: str
    threads: int
    recipe: str
    prompt_tokens: int
    decode_tokens: int
    slots: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    p50_ms: float
    p99_ms: float

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def measure_speed(engine: Engine, prompt_tokens: int, decode_tokens: int, slots: int) -> Speed:
    """Times a prompt of `prompt_tokens` in each of `slots` slots, and `decode_tokens` tokens a slot after it."""
    session = engine.session(slots=slots, context=prompt_tokens + decode_tokens)
    prompt = benchmark_prompt(prompt_tokens, engine.info.vocab_size)
    _warm_up(session, prompt)
    started = time.perf_counter()
    following = [_sample_next(session, prompt, slot) for slot in range(slots)]
    prefill = time.perf_counter() - started
    seconds = []
    all_slots = list(range(slots))
    for position in range(prompt_tokens, prompt_tokens + decode_tokens):
        started = time.perf_counter()
        sampled = session.sample(following, all_slots, [position] * slots, all_slots, Sampling())
        seconds.append(time.perf_counter() - started)
        following = [int(token_id) for token_id in sampled]
    return Speed(
        device=device_name(engine),
        threads=engine.info.threads,
        recipe=recipe_name(engine),
        prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens,
        slots=slots,
        prefill_tokens_per_s=round(slots * prompt_tokens / prefill, 1),
        decode_tokens_per_s=round(slots * decode_tokens / sum(seconds), 1),
        p50_ms=round(_percentile(seconds, 50) * 1e3, 3),
        p99_ms=round(_percentile(seconds, 99) * 1e3, 3),
    )


def recipe_name(engine: Engine) -> str:
    """Target, numerics and the encodings of the weights, as `cpu/exact/experts=int4,dense=int8`."""
    recipe = engine.manifest()["recipe"]
    weights = recipe["weights"]
    return f"{recipe['target']}/{recipe['numerics']}/experts={weights['experts']},dense={weights['dense']}"


def _percentile(seconds: Sequence[float], percent: int) -> float:
    if len(seconds) == 1:
        return seconds[0]
    return statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]


def _warm_up(session: Session, prompt: list[int]) -> None:
    for _ in range(_WARM_UP_STEPS):
        _sample_next(session, prompt, 0)
        session.reset(0)


def _sample_next(session: Session, prompt: list[int], slot: int) -> int:
    length = len(prompt)
    return int(session.sample(prompt, [slot] * length, list(range(length)), [length - 1], Sampling())[0])


@dataclass(frozen=True)
class PhaseTime:
    """One launch, or all launches of one operator, in a step of one phase (`prefill` or `decode`)."""

    seconds: float  # median over the steps
    bytes_moved: int
    share: float | None  # of the machine's read bandwidth; None on a GPU


@dataclass(frozen=True)
class LaunchProfile:
    """A launch by its place in the step. A phase that does not run it is left out."""

    name: str
    kernel: str
    layer: int | None
    phases: dict[str, PhaseTime]


@dataclass(frozen=True)
class KernelProfile:
    """All launches of one operator; the one that takes most of a decode step comes first."""

    kernel: str
    launches: int
    phases: dict[str, PhaseTime]


@dataclass(frozen=True)
class Profile:
    """Where the time of a step goes; `step_seconds` is the sum over the launches by phase."""

    device: str
    threads: int
    recipe: str
    prompt_tokens: int
    decode_tokens: int
    read_bytes_per_s: float | None  # None on a GPU
    read_bandwidth_method: str | None
    step_seconds: dict[str, float]
    kernels: list[KernelProfile]
    launches: list[LaunchProfile]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def to_text(self) -> str:
        times = ", ".join(f"{phase} {seconds * 1e3:.3f} ms" for phase, seconds in self.step_seconds.items())
        lines = [
            f"engine     {self.recipe}, {self.threads} threads on {self.device}",
            *self._bandwidth_lines(),
            f"step       {times}",
            f"           prefill of {self.prompt_tokens} tokens with the logits of each; median of "
            f"{self.decode_tokens} decodes",
            f"bytes      as planned for the whole bucket; {self._bandwidth_column()}",
            "",
            *self._heading("operator"),
        ]
        for kernel in self.kernels:
            lines.append(f"{kernel.kernel:<20}{kernel.launches:>6}{'':<20}" + self._cells(kernel.phases))
        lines += ["", *self._heading("launch")]
        for launch in self.launches:
            layer = "" if launch.layer is None else str(launch.layer)
            lines.append(f"{launch.kernel:<20}{layer:>6} {launch.name[:18]:<19}" + self._cells(launch.phases))
        return "\n".join(lines)

    def _bandwidth_lines(self) -> list[str]:
        if self.read_bytes_per_s is None:
            return []
        return [f"bandwidth  {self.read_bytes_per_s / 1e9:.1f} GB/s read: {self.read_bandwidth_method}"]

    def _bandwidth_column(self) -> str:
        return "bandwidth in GB/s" if self.read_bytes_per_s is None else "bandwidth as a share of the machine's"

    def _heading(self, what: str) -> list[str]:
        phases = "".join(f"{phase:^36}" for phase in self.step_seconds)
        columns = f"{'us':>10}{'time':>7}{'MB':>10}{'bandw.':>9}" * len(self.step_seconds)
        left = f"{what:<20}{'count' if what == 'operator' else 'layer':>6}{'':<20}"
        return [f"{'':<46}{phases}".rstrip(), left + columns]

    def _cells(self, phases: dict[str, PhaseTime]) -> str:
        cells = []
        for phase, total in self.step_seconds.items():
            if (found := phases.get(phase)) is None:
                cells.append(" " * 36)
                continue
            part = found.seconds / total if total else 0.0
            moved = found.bytes_moved / 1e6
            speed = moved / found.seconds / 1e3 if found.seconds else 0.0
            bandwidth = f"{speed:>9.1f}" if found.share is None else f"{found.share:>9.1%}"
            cells.append(f"{found.seconds * 1e6:>10.1f}{part:>7.1%}{moved:>10.3f}{bandwidth}")
        return "".join(cells).rstrip()


def profile_engine(engine: Engine, prompt_tokens: int, decode_tokens: int) -> Profile:
    """Profiles the prefill of a prompt in one step, and the decode steps that follow it."""
    bandwidth = None if engine.info.device else read_bandwidth(engine.info.threads)
    session = engine.session(slots=1, context=prompt_tokens + decode_tokens)
    prompt = benchmark_prompt(prompt_tokens, engine.info.vocab_size)
    _warm_up(session, prompt)
    prefills = []
    for _ in range(_PROFILED_PREFILLS):
        session.reset(0)
        # The logits of every row, as the plan counts the bytes of the head.
        prefills.append(session.profile(prompt, [0] * prompt_tokens, list(range(prompt_tokens))))
    decodes = [
        session.profile([prompt[position % prompt_tokens]], [0], [position])
        for position in range(prompt_tokens, prompt_tokens + decode_tokens)
    ]
    steps = {"prefill": prefills, "decode": decodes}
    return Profile(
        device=device_name(engine),
        threads=engine.info.threads,
        recipe=recipe_name(engine),
        prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens,
        read_bytes_per_s=bandwidth,
        read_bandwidth_method=None if bandwidth is None else BANDWIDTH_METHOD,
        step_seconds={
            phase: statistics.median(sum(launch.seconds for launch in step) for step in found)
            for phase, found in steps.items()
        },
        kernels=_by_kernel(steps, bandwidth),
        launches=_by_launch(steps, bandwidth),
    )


_Steps = dict[str, list[list[LaunchTime]]]  # the launches of every step of a phase


def _phase_times(
    steps: _Steps, key: Callable[[LaunchTime], str], bandwidth: float | None
) -> dict[str, dict[str, PhaseTime]]:
    """Key -> phase -> time. A step that ran in pieces has its launches several times: they add up."""
    times: dict[str, dict[str, PhaseTime]] = {}
    for phase, found in steps.items():
        seconds: dict[str, list[float]] = {}
        moved: dict[str, int] = {}
        for number, step in enumerate(found):
            for launch in step:
                name = key(launch)
                seconds.setdefault(name, [0.0] * len(found))[number] += launch.seconds
                # The same in every step of a phase.
                moved[name] = moved.get(name, 0) + (launch.bytes_moved if number == 0 else 0)
        for name, each in seconds.items():
            median = statistics.median(each)
            share = None
            if bandwidth is not None:
                share = moved[name] / median / bandwidth if median > 0 else 0.0
            times.setdefault(name, {})[phase] = PhaseTime(median, moved[name], share)
    return times


def _by_launch(steps: _Steps, bandwidth: float | None) -> list[LaunchProfile]:
    times = _phase_times(steps, lambda launch: launch.node, bandwidth)
    first = {launch.node: launch for found in steps.values() for launch in reversed(found[0])}
    ordered = sorted(times, key=lambda name: first[name].launch)
    return [LaunchProfile(name, first[name].kernel, first[name].layer, times[name]) for name in ordered]


def _by_kernel(steps: _Steps, bandwidth: float | None) -> list[KernelProfile]:
    times = _phase_times(steps, lambda launch: launch.kernel, bandwidth)
    nodes = {(launch.kernel, launch.node) for found in steps.values() for launch in found[0]}
    counts = Counter(kernel for kernel, _ in nodes)

    def decode_seconds(kernel: str) -> float:
        return times[kernel]["decode"].seconds if "decode" in times[kernel] else 0.0

    ordered = sorted(times, key=lambda kernel: (-decode_seconds(kernel), kernel))
    return [KernelProfile(kernel, counts[kernel], times[kernel]) for kernel in ordered]
