"""The `dsv4c` script: the command line, or one message where a package that it needs is not installed."""

import importlib
import sys

from dsv4c.errors import InputError

# The packages of dsv4c that serving from Python does without.
_PACKAGES = frozenset({"click", "rich", "safetensors", "tokenizers", "torch"})


def main() -> int:
    """Runs the command line and returns its exit code."""
    try:
        # Not imported above: it imports click, which is what may be missing.
        code: int = importlib.import_module("dsv4c.cli.main").main()
        return code
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _PACKAGES:
            raise
        problem = InputError(
            f"this command needs the Python package {package}, which is not installed",
            hint="install dsv4c again without `--no-deps`; without these packages only `dsv4c.runtime` works",
        )
    print(problem.to_text(), file=sys.stderr)
    return problem.exit_code
