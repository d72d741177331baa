"""`dsv4c inspect`."""

import shutil
import sys
from pathlib import Path

import click

from dsv4c.cli.options import json_option, print_json, require_exists
from dsv4c.cli.stdout import write_stdout
from dsv4c.engine.reader import EngineReader, read_engine
from dsv4c.engine.summary import engine_summary, summary_text
from dsv4c.errors import InputError
from dsv4c.planning.engine_budget import budget_lines, engine_budgets
from dsv4c.planning.tables import WIDTH
from dsv4c.topology_view.step import DEFAULT_TOKENS, Step, given_step, sample_step
from dsv4c.topology_view.stored import stored_topology
from dsv4c.topology_view.svg import topology_svg
from dsv4c.topology_view.text import topology_text

_PATH = click.Path(path_type=Path)


@click.command("inspect")
@click.argument("path", type=_PATH)
@click.option("--topology", is_flag=True, help="Draw which SMs compute which routed experts in a step.")
@click.option(
    "--layer",
    type=click.IntRange(min=0),
    show_default="the first with experts",
    help="With --topology: the layer.",
)
@click.option(
    "--sm-count",
    type=click.IntRange(min=1),
    metavar="SMS",
    show_default="the engine's first",
    help="With --topology: SMs of the card.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    help=f"With --topology: rows of the step, routed uniformly; {DEFAULT_TOKENS} if left out.",
)
@click.option("--seed", type=click.IntRange(min=0), help="With --topology: of that routing; 0 if left out.")
@click.option(
    "--hit",
    metavar="LIST",
    help="With --topology: instead, the experts hit and how often, such as 3,17:2,200.",
)
@click.option("--svg", type=_PATH, metavar="FILE", help="With --topology: also write the drawing to FILE.")
@json_option
def inspect_command(
    path: Path,
    topology: bool,
    layer: int | None,
    sm_count: int | None,
    tokens: int | None,
    seed: int | None,
    hit: str | None,
    svg: Path | None,
    as_json: bool,
) -> None:
    """Say what an engine or a checkpoint holds.

    PATH is an engine file or a checkpoint folder. Reads headers, not weights.
    """
    options = {"layer": layer, "sm-count": sm_count, "tokens": tokens, "seed": seed, "hit": hit, "svg": svg}
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given and not topology:
        raise click.UsageError(f"{', '.join(given)} needs --topology")
    if hit is not None and (tokens is not None or seed is not None):
        raise click.UsageError("--hit names the experts; leave --tokens and --seed out")
    is_folder = require_exists(path, "an engine file or a checkpoint folder").is_dir()
    if topology:
        if is_folder:
            raise InputError(
                f"{path} is a checkpoint; experts are placed on SMs when an engine is built",
                hint=f"dsv4c build {path} --target h100 -o model.dsv4c, then inspect model.dsv4c",
            )
        stored = stored_topology(read_engine(path), layer, sm_count)
        step = sample_step(stored, tokens or DEFAULT_TOKENS, seed or 0) if hit is None else given_step(stored, hit)
        _print_topology(step, path, svg, as_json)
        return
    if is_folder:
        # Here and not above: a checkpoint needs torch, which takes seconds to load; an engine does not.
        from dsv4c.checkpoint.checkpoint import open_checkpoint
        from dsv4c.inspection import summarize_checkpoint

        checkpoint = summarize_checkpoint(open_checkpoint(path))
        summary, text = checkpoint.to_dict(), checkpoint.to_text()
    else:
        summary, text = _engine(read_engine(path))
    if as_json:
        print_json(summary)
    else:
        write_stdout(f"{text}\n")


def _engine(reader: EngineReader) -> tuple[dict[str, object], str]:
    summary = engine_summary(reader)
    budgets = engine_budgets(summary["manifest"])
    if budgets is None:
        return summary, summary_text(summary)
    return {**summary, "expert_budgets": budgets}, "\n".join([summary_text(summary), *budget_lines(budgets)])


def _print_topology(step: Step, path: Path, svg: Path | None, as_json: bool) -> None:
    if svg is not None:
        try:
            svg.write_text(topology_svg(step), encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"cannot write {svg}: {error.strerror}", hint="name a file in a folder that can be written to"
            ) from None
    if as_json:
        print_json({"path": str(path), **step.stored.to_dict(), "step": step.to_dict()})
        return
    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH)
    write_stdout(topology_text(step, width, terminal=sys.stdout.isatty()))
