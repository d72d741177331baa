"""`dsv4c inspect`."""

from pathlib import Path

import click

from dsv4c.cli.options import json_option, print_json, require_exists
from dsv4c.cli.stdout import write_stdout
from dsv4c.engine.reader import read_engine
from dsv4c.engine.summary import engine_summary, summary_text


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@json_option
def inspect_command(path: Path, as_json: bool) -> None:
    """Say what an engine or a checkpoint holds.

    PATH is an engine file or a checkpoint folder. Reads headers, not weights.
    """
    if require_exists(path, "an engine file or a checkpoint folder").is_dir():
        # Here and not above: a checkpoint needs torch, which takes seconds to load; an engine does not.
        from dsv4c.checkpoint.checkpoint import open_checkpoint
        from dsv4c.inspection import summarize_checkpoint

        checkpoint = summarize_checkpoint(open_checkpoint(path))
        summary, text = checkpoint.to_dict(), checkpoint.to_text()
    else:
        summary = engine_summary(read_engine(path))
        text = summary_text(summary)
    if as_json:
        print_json(summary)
    else:
        write_stdout(f"{text}\n")
