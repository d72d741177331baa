"""`dsv4c verify`: every digest of an engine, and with `replay` its goldens on this machine's runtime."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4c.engine.goldens import GoldenLaunch, Goldens, GoldenStep, fingerprint, first_difference
from dsv4c.engine.reader import EngineReader, read_engine
from dsv4c.errors import Dsv4cError, InputError
from dsv4c.runtime.engine import Engine, Session
from dsv4c.runtime.trace import TraceOutput

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class VerifyReport:
    """What was checked, a line each; `ok` where all of it agreed."""

    ok: bool
    lines: list[str]
    digest: str | None
    first_difference: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "digest": self.digest,
            "lines": self.lines,
            "first_difference": self.first_difference,
        }


def verify_engine(path: Path, replay: bool, progress: Progress | None = None) -> VerifyReport:
    """Check header, sections and weight chunks; then, with `replay`, run the goldens.

    Damage is part of the report (`ok` is False), not an exception. Raises InputError where a replay is asked of an
    engine without goldens.
    """
    lines: list[str] = []
    try:
        reader = read_engine(path)
        reader.verify_sections()
        lines.append(f"sections  {len(reader.sections)} match their digests")
        reader.verify_weights(None if progress is None else lambda done, total: progress("weights", done, total))
        lines.append(f"weights   {reader.chunks.chunk_count} chunks match their digests")
    except Dsv4cError as error:
        return VerifyReport(False, [*lines, error.message], None, None)
    if not replay:
        return VerifyReport(True, lines, reader.digest, None)
    return _replay(reader, lines, progress)


def _replay(reader: EngineReader, lines: list[str], progress: Progress | None) -> VerifyReport:
    recorded = reader.goldens
    if recorded is None:
        raise InputError(
            f"{reader.path} holds no goldens to replay",
            hint="build it without `--no-goldens`, or verify without --replay",
        )
    goldens = Goldens.from_dict(recorded)
    positions = max(step.position + len(step.token_ids) for step in goldens.steps)
    with Engine.open(reader.path) as engine:
        session = engine.session(slots=1, context=positions)
        for number, step in enumerate(goldens.steps):
            if progress is not None:
                progress("goldens", number, len(goldens.steps))
            found = first_difference(goldens, step.launches, _run(session, step))
            if found is not None:
                return _differs(reader, lines, step, *found, goldens.tolerance)
    tokens = sum(len(step.token_ids) for step in goldens.steps)
    lines.append(f"goldens   {tokens} tokens in {len(goldens.steps)} steps agree at every launch")
    return VerifyReport(True, lines, reader.digest, None)


def _run(session: Session, step: GoldenStep) -> list[GoldenLaunch]:
    launches: list[GoldenLaunch] = []

    def watch(index: int, kernel: str, node: str, layer: int | None, outputs: list[TraceOutput]) -> None:
        launches.append(GoldenLaunch(kernel, node, layer, tuple(fingerprint(o.to_float32()) for o in outputs)))

    rows = len(step.token_ids)
    session.trace(list(step.token_ids), [0] * rows, list(range(step.position, step.position + rows)), watch)
    return launches


def _differs(
    reader: EngineReader, lines: list[str], step: GoldenStep, index: int, error: float, tolerance: float
) -> VerifyReport:
    launch = step.launches[min(index, len(step.launches) - 1)]
    place = "outside the layers" if launch.layer is None else f"layer {launch.layer}"
    lines.append(
        f"goldens   differ first at {place}, launch {index} ({launch.name} = {launch.kernel}), position "
        f"{step.position}: relative error {error:.3g}, allowed {tolerance:.3g}"
    )
    where = {
        "layer": launch.layer,
        "launch": index,
        "name": launch.name,
        "kernel": launch.kernel,
        "position": step.position,
        "error": error,
    }
    return VerifyReport(False, lines, reader.digest, where)
