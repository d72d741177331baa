"""Options and argument checks that commands share."""

import json
import os
from pathlib import Path

import click

from dsv4c.cli.stdout import write_stdout
from dsv4c.errors import InputError

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


def require_engine_file(path: Path) -> Path:
    """`path` if it is a file; a folder is most likely the checkpoint."""
    if path.is_dir():
        raise InputError(
            f"{path} is a folder, not an engine file", hint=f"build one first: dsv4c build {path} --target cpu"
        )
    return require_exists(path, "an engine file, which `dsv4c build CHECKPOINT --target cpu` makes")


def require_exists(path: Path, expected: str) -> Path:
    """`path` if there is such a thing; `expected` says what it should be."""
    if not path.exists():
        raise InputError(f"there is no {path}", hint=f"give the path of {expected}")
    return path


def available_threads(threads: int | None) -> int | None:
    """No more than processors: threads that wait for each other make every step slower."""
    available = len(os.sched_getaffinity(0))
    if threads is None or threads <= available:
        return threads
    print_note(f"{available} threads instead of {threads}: one for each processor that is available")
    return available


def print_note(text: str) -> None:
    """What a person should know about a command that goes on."""
    click.echo(f"note: {text}", err=True)


def print_json(value: dict[str, object]) -> None:
    """Data for a program, on stdout."""
    write_stdout(json.dumps(value, indent=2) + "\n")
