"""`dsv4c plan`."""

import sys
from pathlib import Path

import click

from dsv4c.cli.options import json_option, print_json
from dsv4c.cli.stdout import write_stdout
from dsv4c.errors import InputError
from dsv4c.planning.charts import require_charts
from dsv4c.planning.compare import comparison
from dsv4c.planning.html import plan_page
from dsv4c.planning.tables import render
from dsv4c.planning.targets import MODULES, PLAN_TARGETS, find_plan_target, plan_recipe
from dsv4c.planning.text import model_lines, plan_sections, summary_lines

_PATH = click.Path(path_type=Path)
_POSITIVE = click.IntRange(min=1)


@click.command("plan")
@click.argument("model", type=_PATH)
@click.option("--target", required=True, metavar="NAME", help=f"What to plan for: {', '.join(PLAN_TARGETS)}.")
@click.option(
    "--recipe", type=_PATH, metavar="RECIPE", help="A recipe other than the target's own one: a file or name."
)
@click.option("--context", type=_POSITIVE, show_default="8192, or the model's", help="Positions of a sequence.")
@click.option("--slots", type=_POSITIVE, default=1, show_default=True, help="Sequences at once.")
@click.option("--tp", type=_POSITIVE, default=1, show_default=True, help="Ranks that share every matrix.")
@click.option("--ep", type=_POSITIVE, default=1, show_default=True, help="Groups that share the experts.")
@click.option(
    "--module",
    metavar="NAME",
    help="A product of the target: " + "; ".join(f"{t}: {', '.join(m)}" for t, m in MODULES.items()) + ".",
)
@click.option(
    "--memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB",
    show_default="the target's; on cpu this machine's",
    help="Memory of a device.",
)
@click.option(
    "--bandwidth",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB/S",
    show_default="the target's; on cpu unknown",
    help="Memory bandwidth of a device.",
)
@click.option("--compare", metavar="NAME", help="Show this target beside the first, each with its own recipe.")
@click.option("--html", type=_PATH, metavar="FILE", help="Write a page with charts, which needs no other file.")
@json_option
def plan_command(
    model: Path,
    target: str,
    recipe: Path | None,
    context: int | None,
    slots: int,
    tp: int,
    ep: int,
    module: str | None,
    memory: float | None,
    bandwidth: float | None,
    compare: str | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Say what a model needs before it is built.

    MODEL is a checkpoint folder, of which only config.json and the headers are
    read, or a config.json alone. Does it fit, in how many devices and how split,
    how long a context, how fast at best, and which kernel runs on which shape.
    """
    chosen = [find_plan_target(target, memory, bandwidth, module)]
    recipes = [plan_recipe(chosen[0], recipe)]
    if compare is not None:
        chosen.append(find_plan_target(compare))
        recipes.append(plan_recipe(chosen[1], None))
    if html is not None:
        _check_page(html)
        require_charts()
    # Here and not above: planning loads torch, which takes seconds, and `--help` needs none of it.
    from dsv4c.planning.model_plan import PlanOptions, make_plan
    from dsv4c.planning.source import open_source

    source = open_source(model)
    options = PlanOptions(context, slots, tp, ep)
    plans = [make_plan(source, *each, options) for each in zip(chosen, recipes, strict=True)]
    if html is not None:
        html.write_text(plan_page(plans), encoding="utf-8")
    if as_json:
        print_json(plans[0] if compare is None else {"plans": plans})
        return
    head = summary_lines(plans[0]) if compare is None else model_lines(plans[0])
    sections = plan_sections(plans[0]) if compare is None else [comparison(plans)]
    warnings = [f"warning: {warning}" for warning in source.warnings]
    write_stdout(render(head, sections, warnings, terminal=sys.stdout.isatty()))


def _check_page(path: Path) -> None:
    """Found out before the plan is made."""
    if path.is_dir():
        raise InputError(f"{path} is a folder", hint=f"name a file, such as --html {path / 'plan.html'}")
    if not path.parent.is_dir():
        raise InputError(f"the folder of the page, {path.parent}, does not exist", hint="make it first")
