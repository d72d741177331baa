"""The `dsv4c` command: finds the subcommand, and turns what it raises into messages and exit codes."""

import errno
import importlib
import sys
from collections.abc import Sequence

import click

from dsv4c import errors
from dsv4c.cli.interruption import interruptible
from dsv4c.cli.stdout import drop_stdout
from dsv4c.engine.format import FORMAT_VERSION
from dsv4c.errors import Dsv4cError, InputError
from dsv4c.version import VERSION

# Command -> module (which defines `<command>_command`) and the line for `--help`. A command's module is imported only
# when that command runs, so that none pays for the imports of another.
_COMMANDS: dict[str, tuple[str, str]] = {
    "bench": ("dsv4c.cli.bench", "Measure the speed or the quality of an engine."),
    "build": ("dsv4c.cli.build", "Build an engine from a checkpoint."),
    "cache": ("dsv4c.cli.cache", "List and clean the kernel caches of dsv4c and of the tools around it."),
    "doctor": ("dsv4c.cli.doctor", "Say whether this machine can build and run, and what is missing."),
    "inspect": ("dsv4c.cli.inspect", "Say what an engine or a checkpoint holds."),
    "plan": ("dsv4c.cli.plan", "Say what a model needs before it is built."),
    "run": ("dsv4c.cli.run", "Generate text from a prompt."),
    "verify": ("dsv4c.cli.verify", "Check an engine's digests and, with --replay, its goldens."),
}

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells have it
BROKEN_PIPE_EXIT_CODE = 141  # 128 + SIGPIPE


def exit_codes() -> dict[int, str]:
    """Every exit code and what it says; the README has the same table."""
    codes = {0: "success", 1: "a bug in dsv4c (a traceback, please report it)", USAGE_EXIT_CODE: "wrong usage"}
    stages = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, Dsv4cError)]
    for cls in stages:
        if cls is not Dsv4cError:
            codes[cls.exit_code] = (cls.__doc__ or "").rstrip(".").lower()
    codes[INTERRUPTED_EXIT_CODE] = "interrupted (Ctrl-C, SIGTERM)"
    codes[BROKEN_PIPE_EXIT_CODE] = "the reader of the output went away"
    return dict(sorted(codes.items()))


class LazyGroup(click.Group):
    """A group whose commands are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(_COMMANDS[cmd_name][0])
        command = getattr(module, f"{cmd_name}_command")
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            result: object = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # Here, because click itself would end with 1.
            drop_stdout()
            raise click.exceptions.Exit(BROKEN_PIPE_EXIT_CODE) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in exit_codes().items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(VERSION, message=f"dsv4c %(version)s, engine format {FORMAT_VERSION}")
def cli() -> None:
    """Compile DeepSeek-V4 checkpoints to sealed engine files, and run them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code. What is not a user's problem stays a traceback.

    Being told to end (SIGTERM, SIGHUP) is as Ctrl-C: what was begun is cleared away.
    """
    with interruptible():
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        code = cli.main(args=arguments, prog_name="dsv4c", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED_EXIT_CODE
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        click.echo(_usage_error(error).to_text(), err=True)
        return error.exit_code
    except Dsv4cError as error:
        return _fail(error)
    except OSError as error:
        return _fail(_input_error(error))


def _fail(error: Dsv4cError) -> int:
    click.echo(error.to_text(), err=True)
    return error.exit_code


def _usage_error(error: click.ClickException) -> Dsv4cError:
    """What click says, in the form of all messages."""
    text = error.format_message().rstrip(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = "dsv4c" if context is None else context.command_path
    return Dsv4cError(text[:1].lower() + text[1:], hint=f"see `{command} --help`")


def _input_error(error: OSError) -> InputError:
    reason = error.strerror or str(error)
    message = reason if error.filename is None else f"{error.filename}: {reason}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return InputError(message, hint="free some space, or write to another disk")
    return InputError(message, hint=None if error.filename is None else "check the path and its permissions")
