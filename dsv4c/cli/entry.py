"""The `dsv4c` script: the command line; where a package that it needs is not installed, one message.

`dsv4c doctor` works without any, so that it can name them.
"""

import importlib
import signal
import sys

from dsv4c.errors import InputError

# The packages of dsv4c that serving from Python does without.
_PACKAGES = frozenset({"click", "rich", "tokenizers", "torch"})


def main() -> int:
    """Runs the command line and returns its exit code."""
    try:
        # Not imported above: it imports click, which is what may be missing.
        code = _main_of("dsv4c.cli.main")
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _PACKAGES:
            raise
        if sys.argv[1:2] == ["doctor"]:
            return _main_of("dsv4c.doctor.examination", sys.argv[2:])
        problem = InputError(
            f"this command needs the Python package {package}, which is not installed",
            hint="install dsv4c again without `--no-deps`; without these packages only `dsv4c.runtime` and "
            "`dsv4c doctor` work",
        )
        print(problem.to_text(), file=sys.stderr)
        return problem.exit_code
    # All is cleared away: while Python and torch end, Ctrl-C ends the process as SIGTERM does, without an exception.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


def _main_of(module: str, *arguments: list[str]) -> int:
    code: int = importlib.import_module(module).main(*arguments)
    return code
