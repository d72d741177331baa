"""What `dsv4c doctor` reports: checks, and verdicts on what was asked."""

import enum
from dataclasses import dataclass, field
from typing import Any

from dsv4c.errors import DoctorError
from dsv4c.version import VERSION

DEFAULT_TARGET = "cpu"  # what is asked about where no target is named


class State(enum.Enum):
    OK = "ok"
    WARNING = "warning"  # works, with a restriction that `found` names
    MISSING = "missing"  # something that was asked for is not possible
    NOT_NEEDED = "not needed"  # for what was asked; `found` may still say what there is


class Need(enum.Enum):
    """What a check is about; the first two have a verdict each."""

    BUILD = "build"
    RUN = "run"
    COMMAND = "command"  # `dsv4c run`; serving from Python, C and C++ does without


@dataclass(frozen=True)
class Check:
    """`facts` has the numbers behind `found`, for programs."""

    name: str
    state: State
    found: str
    mend: str | None = None
    needs: frozenset[Need] = frozenset()  # what is impossible, or restricted, when this is not ok
    facts: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        needed_for = sorted(need.value for need in self.needs)
        return {
            "name": self.name,
            "state": self.state.value,
            "found": self.found,
            "mend": self.mend,
            "needed_for": needed_for,
            "facts": self.facts,
        }


@dataclass(frozen=True)
class Verdict:
    """Whether what was asked is possible: to build for target `subject`, or to run engine `subject`."""

    need: Need
    subject: str | None
    blocked_by: tuple[str, ...]  # names of checks
    command_blocked_by: tuple[str, ...] = ()

    @property
    def possible(self) -> bool:
        return not self.blocked_by

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.need.value,
            "subject": self.subject,
            "possible": self.possible,
            "blocked_by": list(self.blocked_by),
            "command_blocked_by": list(self.command_blocked_by),
        }

    def __str__(self) -> str:
        what = f"build for {self.subject}" if self.need is Need.BUILD else f"run {self.subject or 'engines'}"
        if self.blocked_by:
            return f"{what}: no ({', '.join(self.blocked_by)})"
        if self.command_blocked_by:
            missing = ", ".join(self.command_blocked_by)
            return f"{what}: yes, from Python, C and C++; the `dsv4c run` command needs {missing}"
        return f"{what}: yes"


@dataclass(frozen=True)
class Report:
    checks: list[Check]
    verdicts: list[Verdict]

    @property
    def possible(self) -> bool:
        return all(verdict.possible for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """The keys of every level stay; checks may be added."""
        return {
            "dsv4c_version": VERSION,
            "possible": self.possible,
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
            "checks": [check.to_dict() for check in self.checks],
        }

    def to_text(self) -> str:
        names = max(len(check.name) for check in self.checks) + 2
        states = max(len(state.value) for state in State) + 2
        lines = []
        for check in self.checks:
            lines.append(f"{check.name:<{names}}{check.state.value:<{states}}{check.found}")
            if check.mend is not None:
                lines.append(f"{'':<{names + states}}-> {check.mend}")
        lines += ["", *map(str, self.verdicts)]
        # Paths and messages of other software: no control character reaches the terminal.
        return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)

    def require_possible(self) -> None:
        """Raises DoctorError where something that was asked is not possible."""
        if not self.possible:
            refused = ", ".join(str(verdict) for verdict in self.verdicts if not verdict.possible)
            raise DoctorError(refused, hint="the lines marked `missing` say what mends it")


def failed_check(
    name: str,
    asked: frozenset[Need],
    needs: frozenset[Need],
    found: str,
    mend: str | None,
    facts: dict[str, Any] | None = None,
) -> Check:
    """A check that did not succeed: how bad that is depends on what was asked."""
    if needs & asked & {Need.BUILD, Need.RUN}:
        state = State.MISSING
    else:
        state = State.WARNING if needs & asked else State.NOT_NEEDED
    return Check(name, state, found, mend if state is not State.NOT_NEEDED else None, needs, facts or {})


def size_text(size_bytes: int) -> str:
    """`1.5 GiB`."""
    size, units = float(size_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
