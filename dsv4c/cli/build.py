"""`dsv4c build`."""

from pathlib import Path

import click

from dsv4c.cli.options import json_option, print_json
from dsv4c.cli.progress import stderr_progress
from dsv4c.errors import InputError
from dsv4c.recipe import Numerics, Recipe
from dsv4c.target import TARGETS

_PATH = click.Path(path_type=Path)


@click.command("build")
@click.argument("checkpoint", type=_PATH)
@click.option("--target", required=True, metavar="NAME", help=f"What to build for: {', '.join(TARGETS)}.")
@click.option(
    "--recipe",
    type=_PATH,
    metavar="RECIPE",
    help="A recipe other than the target's own one: a file, or a name such as cpu-reference.",
)
@click.option(
    "-o", "--output", type=_PATH, metavar="FILE", show_default="CHECKPOINT.NAME.dsv4c, here", help="The engine file."
)
@click.option(
    "--numerics",
    type=click.Choice(["exact", "reference"]),
    help="Instead of the recipe's: fp32 throughout, or the quantisation the model was trained with.",
)
@click.option("--dump-dir", type=_PATH, metavar="DIR", help="Write the graph after every pass, and the plan, here.")
@click.option(
    "--split-weights",
    is_flag=True,
    help="Put the weights into a file of their own beside the engine; it must keep the name it gets.",
)
@click.option("--no-goldens", is_flag=True, help="Leave out the run that `verify --replay` repeats.")
@click.option(
    "--check-values/--no-check-values",
    default=True,
    help="Refuse weights that are NaN or infinite, and tables with ids that are no experts; done unless turned off. "
    "Without it a damaged checkpoint becomes an engine that answers nonsense.",
)
@click.option(
    "--memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB",
    show_default="the target's; on cpu this machine's",
    help="Memory of the machine that the engine is for; a model that does not fit is refused.",
)
@click.option("--force", is_flag=True, help="Build a model that does not fit the memory; the engine says so.")
@json_option
def build_command(
    checkpoint: Path,
    target: str,
    recipe: Path | None,
    output: Path | None,
    numerics: Numerics | None,
    dump_dir: Path | None,
    split_weights: bool,
    no_goldens: bool,
    check_values: bool,
    memory: float | None,
    force: bool,
    as_json: bool,
) -> None:
    """Build an engine from a checkpoint.

    CHECKPOINT is the folder with config.json and the safetensors files. The
    report goes to stderr, or with --json to stdout.
    """
    chosen = Recipe.for_target(target, recipe).with_overrides(numerics=numerics)
    path = _checked_output(output or Path(f"{checkpoint.resolve().name}.{target}.dsv4c"))
    # Here and not above: the compiler loads torch, which takes seconds, and `--help` needs none of it.
    from dsv4c.compiler import build_engine

    with stderr_progress() as progress:
        report = build_engine(
            checkpoint,
            chosen,
            path,
            dump_dir=dump_dir,
            split_weights=split_weights,
            goldens=not no_goldens,
            check_values=check_values,
            memory_gb=memory,
            force=force,
            progress=progress,
        )
    if as_json:
        print_json(report.to_dict())
    else:
        click.echo(report.to_text(), err=True)


def _checked_output(path: Path) -> Path:
    """Found out before the build, which may take an hour."""
    if path.is_dir():
        raise InputError(f"the output {path} is a folder", hint=f"name a file, such as -o {path / 'model.dsv4c'}")
    if not path.parent.is_dir():
        raise InputError(f"the folder of the output, {path.parent}, does not exist", hint="make it first")
    return path
