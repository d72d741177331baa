"""`dsv4c verify`: every digest of an engine, and with `replay` its goldens on this machine's runtime."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4c.engine.goldens import GoldenLaunch, Goldens, GoldenStep, fingerprint, first_difference
from dsv4c.engine.reader import EngineReader, read_engine
from dsv4c.errors import EngineFormatError, InputError
from dsv4c.runtime.engine import Engine
from dsv4c.runtime.session import Session
from dsv4c.runtime.trace import TraceOutput

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class VerifyReport:
    """What was checked, a line each; `ok` where all of it agreed.

    `failed` says which check did not ("sections", "weights" or "goldens") and what was found; `first_difference` where
    a replay first differs.
    """

    ok: bool
    lines: list[str]
    digest: str
    failed: dict[str, str] | None = None
    first_difference: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "digest": self.digest,
            "lines": self.lines,
            "failed": self.failed,
            "first_difference": self.first_difference,
        }


def verify_engine(path: Path, replay: bool, progress: Progress | None = None) -> VerifyReport:
    """Check every section and weight chunk against its digest; then, with `replay`, run the goldens.

    A digest or a golden that does not match is part of the report (`ok` is False). Raises EngineFormatError where the
    file is no whole engine of a version this dsv4c reads, InputError where a replay is asked of one without goldens.
    """
    reader = read_engine(path)
    if not reader.weights_path().is_file():
        raise EngineFormatError(
            f"{reader.weights_path()} is missing: the weights of {path.name} are in that file",
            hint="keep the engine and its weights file in one folder, under the names they were built with",
        )
    lines: list[str] = []
    try:
        reader.verify_sections()
    except EngineFormatError as error:
        return _failed(reader, lines, "sections", error.message)
    lines.append(f"sections  {len(reader.sections) - 1} match their digests")
    try:
        reader.verify_weights(None if progress is None else lambda done, total: progress("weights", done, total))
    except EngineFormatError as error:
        return _failed(reader, lines, "weights", error.message)
    lines.append(f"weights   {reader.chunks.chunk_count} chunks match their digests")
    return _replay(reader, lines, progress) if replay else VerifyReport(True, lines, reader.digest)


def _failed(reader: EngineReader, lines: list[str], check: str, message: str) -> VerifyReport:
    return VerifyReport(False, [*lines, message], reader.digest, {"check": check, "found": message})


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
    return VerifyReport(True, lines, reader.digest)


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
    found = (
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
    failed = {"check": "goldens", "found": found}
    return VerifyReport(False, [*lines, found], reader.digest, failed, where)
