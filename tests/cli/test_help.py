"""`--help` of every command: the goldens, the README, the exit codes, and how fast it starts."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dsv4c.cli.main import cli, exit_codes

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
COMMANDS = cli.list_commands(click.Context(cli))
HELP_CALLS = ["dsv4c --help", *(f"dsv4c {name} --help" for name in COMMANDS)]


def help_text(call: str) -> str:
    result = CliRunner().invoke(cli, call.split()[1:], prog_name="dsv4c", terminal_width=80)
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("call", HELP_CALLS)
def test_help(call: str, golden: Callable[[str, str], None]) -> None:
    name = call.removesuffix(" --help").replace(" ", "-")
    golden(f"help/{name}.txt", help_text(call))


@pytest.mark.parametrize("call", HELP_CALLS)
def test_readme_has_the_help_text(call: str) -> None:
    assert f"```\n$ {call}\n{help_text(call)}```\n" in README, f"README.md differs from `{call}`"


@pytest.mark.parametrize("name", COMMANDS)
def test_list_of_commands_has_each_command_s_own_line(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None and command.help is not None
    assert f"  {name} " in help_text("dsv4c --help")
    assert command.help.split("\n\n")[0] in " ".join(help_text("dsv4c --help").split())


def test_readme_has_the_exit_codes() -> None:
    table = dict(re.findall(r"^\| (\d+) \| (.+) \|$", README, re.MULTILINE))
    assert table == {str(code): meaning for code, meaning in exit_codes().items()}


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), ["inspect", "absent"], ["verify", "absent"]],
    ids=" ".join,
)
def test_starts_without_torch(arguments: list[str]) -> None:
    """torch takes seconds to load; only building, replaying and reading checkpoints need it."""
    script = (
        "import sys; from dsv4c.cli.main import main; main(sys.argv[1:]); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
