"""What every command shares: messages on stderr, exit codes, an interrupted or abandoned run."""

from collections.abc import Callable

import click
import pytest

from dsv4c.cli.main import LazyGroup, exit_codes, main
from dsv4c.engine.format import FORMAT_VERSION
from dsv4c.errors import CheckpointError, Dsv4cError
from dsv4c.version import VERSION


@pytest.fixture
def command_that(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes every command raise an exception."""

    def install(error: BaseException) -> None:
        def fail(*_: object) -> click.Command:
            raise error

        monkeypatch.setattr(LazyGroup, "get_command", fail)

    return install


def test_error_is_message_blank_line_hint(
    command_that: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command_that(CheckpointError("shard 2 is missing", hint="download it"))
    assert main(["inspect", "x"]) == CheckpointError.exit_code
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: shard 2 is missing\n\nhint: download it\n")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (PermissionError(13, "Permission denied", "a/b"), 12, "error: a/b: Permission denied"),
        (OSError(28, "No space left on device"), 12, "error: No space left on device"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_system_errors(
    error: BaseException,
    code: int,
    message: str,
    command_that: Callable[[BaseException], None],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Pytest needs its stdout.
    monkeypatch.setattr("os.dup2", lambda *_: None)
    command_that(error)
    assert main(["run", "x", "y"]) == code
    err = capfd.readouterr().err
    assert err.startswith(message) and "Traceback" not in err


def test_bug_stays_a_traceback(command_that: Callable[[BaseException], None]) -> None:
    command_that(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["run", "x", "y"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["biuld"], "No such command 'biuld'"),
        (["build"], "Missing argument 'CHECKPOINT'"),
        (["build", "x"], "Missing option '--target'"),
        (["run", "x", "y", "--top-p", "2"], "Invalid value for '--top-p'"),
        (["run", "x"], "give a PROMPT"),
        (["run", "x", "y", "--system", "z"], "--system needs --chat"),
        (["run", "x", "1", "--ids", "--stop", "a"], "--ids takes no"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dsv4c {VERSION}, engine format {FORMAT_VERSION}\n"


def test_every_stage_has_an_exit_code_of_its_own() -> None:
    stages = Dsv4cError.__subclasses__()
    assert len({cls.exit_code for cls in stages} - {0, 1, 2}) == len(stages)
    assert {cls.exit_code for cls in stages} <= exit_codes().keys()
