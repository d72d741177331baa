"""What every command shares: messages on stderr, exit codes, an interrupted or abandoned run."""

import signal
import subprocess
import sys
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
        (
            PermissionError(13, "Permission denied", "a/b"),
            12,
            "error: a/b: Permission denied\n\nhint: check the path and its permissions\n",
        ),
        (OSError(24, "Too many open files"), 12, "error: Too many open files\n"),
        (OSError(28, "No space left on device", "a"), 12, "error: a: No space left on device\n\nhint: free some space"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
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
    ("arguments", "message", "command"),
    [
        (["biuld"], "no such command 'biuld'", "dsv4c"),
        (["build"], "missing argument 'CHECKPOINT'", "dsv4c build"),
        (["build", "x"], "missing option '--target'", "dsv4c build"),
        (["run", "x", "y", "--top-p", "2"], "invalid value for '--top-p': 2.0 is not in the range", "dsv4c run"),
        (["run", "x"], "give a PROMPT, or", "dsv4c run"),
        (["run", "x", "y", "--prompt-file", "z"], "give a PROMPT or --prompt-file, not both", "dsv4c run"),
        (["run", "x", "y", "--system", "z"], "--system needs --chat", "dsv4c run"),
        (["run", "x", "1", "--ids", "--stop", "a"], "--ids takes no", "dsv4c run"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}")
    assert err.endswith(f"\n\nhint: see `{command} --help`\n")


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("Usage: dsv4c ")


@pytest.mark.parametrize(("package", "arguments"), [("click", ["--help"]), ("rich", ["verify", "x"])])
def test_package_that_is_not_installed(package: str, arguments: list[str]) -> None:
    script = (
        f"import sys; sys.modules[{package!r}] = None; from dsv4c.cli.entry import main; "
        "sys.argv[0] = 'dsv4c'; sys.exit(main())"
    )
    result = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (12, "")
    assert result.stderr.startswith(f"error: this command needs the Python package {package}, which is not installed")
    assert "Traceback" not in result.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dsv4c {VERSION}, engine format {FORMAT_VERSION}\n"


def test_every_stage_has_an_exit_code_of_its_own() -> None:
    stages = Dsv4cError.__subclasses__()
    assert len({cls.exit_code for cls in stages} - {0, 1, 2}) == len(stages)
    assert {cls.exit_code for cls in stages} <= exit_codes().keys()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_being_told_to_end_is_an_interruption(number: signal.Signals) -> None:
    """What a command was writing is cleared away by its `finally` and context managers, whichever way it ends."""
    script = """
import signal, sys, time
from dsv4c.cli import main
# A run of the tests in the background may have them ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
@main.cli.command("wait")
def wait():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("cleared", flush=True)
main.LazyGroup.get_command = lambda self, context, name: wait
sys.exit(main.main(["wait"]))
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err.strip()) == (130, "cleared\n", "interrupted")
