"""Options and argument checks that commands share."""

import json
from pathlib import Path

import click

from dsv4c.errors import InputError

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


def require_engine_file(path: Path) -> Path:
    """`path` if it is a file; a folder is most likely the checkpoint."""
    if path.is_dir():
        raise InputError(f"{path} is a folder, not an engine file", hint=f"build one first: dsv4c build {path}")
    return require_exists(path)


def require_exists(path: Path) -> Path:
    if not path.exists():
        raise InputError(f"there is no {path}", hint="check the path")
    return path


def print_json(value: dict[str, object]) -> None:
    """Data for a program, on stdout."""
    click.echo(json.dumps(value, indent=2))
