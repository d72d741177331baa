"""`dsv4c doctor`."""

from pathlib import Path

import click

from dsv4c.cli.options import json_option, print_json
from dsv4c.cli.stdout import write_stdout
from dsv4c.doctor.examination import examine


@click.command("doctor")
@click.argument("engine", required=False, type=click.Path(path_type=Path))
@click.option("--target", metavar="NAME", help="Ask whether engines for NAME can be built here.")
@json_option
def doctor_command(engine: Path | None, target: str | None, as_json: bool) -> None:
    """Say whether this machine can build and run, and what is missing.

    With ENGINE: whether it can be run here. With --target: whether engines for
    that target can be built here. With neither: both, for the cpu. What is
    missing is followed by the command that mends it. Without the packages that
    `dsv4c` needs, `python -m dsv4c.doctor` does the same.
    """
    report = examine(engine, target)
    if as_json:
        print_json(report.to_dict())
    else:
        write_stdout(f"{report.to_text()}\n")
    report.require_possible()
