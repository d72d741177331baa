"""Errors a user can act on: one class per stage, each with the exit code that the command line returns.

Anything that is not a `Dsv4cError` is a bug in dsv4c and stays a traceback.
"""

from typing import ClassVar


class Dsv4cError(Exception):
    """A problem in what the user gave us: a message (what, where, what was expected) and a hint (what to do)."""

    exit_code: ClassVar[int] = 1
    stage: ClassVar[str] = "dsv4c"

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def to_text(self) -> str:
        """`error: ...`, and after a blank line `hint: ...` when there is one."""
        text = f"error: {self.message}"
        return f"{text}\n\nhint: {self.hint}" if self.hint else text


class RecipeError(Dsv4cError):
    """The recipe file or a build option is wrong."""

    exit_code = 3
    stage = "recipe"


class CheckpointError(Dsv4cError):
    """The checkpoint is incomplete, damaged, or not a model dsv4c compiles."""

    exit_code = 4
    stage = "checkpoint"


class GraphError(Dsv4cError):
    """The model's configuration cannot be written as a graph."""

    exit_code = 5
    stage = "graph"


class PassError(Dsv4cError):
    """A pass was asked for something it cannot do on this model or target."""

    exit_code = 6
    stage = "passes"


class PlanError(Dsv4cError):
    """The graph cannot be lowered to launches of this target."""

    exit_code = 7
    stage = "plan"


class KernelError(Dsv4cError):
    """A kernel is missing or does not compile."""

    exit_code = 8
    stage = "kernels"


class EngineFormatError(Dsv4cError):
    """The engine file is damaged, of another version or for another machine, or cannot be written."""

    exit_code = 9
    stage = "engine"


class SessionError(Dsv4cError):
    """A call on an open engine or session was refused; the session is still usable."""

    exit_code = 10
    stage = "runtime"


class VerifyError(Dsv4cError):
    """`dsv4c verify` found a difference."""

    exit_code = 11
    stage = "verify"


class InputError(Dsv4cError):
    """An input of a command (a prompt, an output path) cannot be used."""

    exit_code = 12
    stage = "input"


class DoctorError(Dsv4cError):
    """`dsv4c doctor` found that this machine cannot do what was asked."""

    exit_code = 13
    stage = "doctor"


class CacheError(Dsv4cError):
    """`dsv4c cache` was asked for a kind that it does not know, or could not remove all it should."""

    exit_code = 14
    stage = "cache"
