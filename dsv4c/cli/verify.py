"""`dsv4c verify`."""

from pathlib import Path

import click

from dsv4c.cli.options import json_option, print_json, require_engine_file
from dsv4c.cli.progress import stderr_progress
from dsv4c.cli.stdout import write_stdout
from dsv4c.errors import VerifyError
from dsv4c.verification import verify_engine


@click.command("verify")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--replay", is_flag=True, help="Also run the goldens; names the first layer and launch that differ.")
@json_option
def verify_command(engine: Path, replay: bool, as_json: bool) -> None:
    """Check an engine's digests and, with --replay, its goldens.

    Reads all of ENGINE, weights included, and compares every section and
    weight chunk with its digest.
    """
    path = require_engine_file(engine)
    with stderr_progress() as progress:
        report = verify_engine(path, replay=replay, progress=progress)
    if as_json:
        print_json(report.to_dict())
    else:
        write_stdout("".join(f"{line}\n" for line in report.lines))
    if not report.ok:
        raise VerifyError(f"{path} does not verify", hint="build it again, or copy it again from where it was built")
