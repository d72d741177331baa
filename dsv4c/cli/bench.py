"""`dsv4c bench`."""

import csv
import io
from pathlib import Path

import click

from dsv4c.benchmark import measure_speed, profile_engine
from dsv4c.cli.options import available_threads, json_option, print_json, require_engine_file, require_exists
from dsv4c.cli.progress import stderr_progress
from dsv4c.cli.stdout import write_stdout
from dsv4c.perplexity import measure_perplexity, read_texts, token_rows
from dsv4c.runtime.engine import Engine
from dsv4c.text import Tokenizer

_PATH = click.Path(path_type=Path)


@click.command("bench")
@click.argument("engine", type=_PATH)
@click.option(
    "--perplexity", "documents", type=_PATH, metavar="FILE", help='Of documents: one {"text": "..."} a line of FILE.'
)
@click.option("--rows", type=click.IntRange(min=1), help="Only the first ROWS rows of 512 tokens.")
@click.option("--profile", is_flag=True, help="Time and bandwidth of every launch of a step.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Prefill this many.")
@click.option("--decode-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Then decode so many.")
@click.option("--slots", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences at once.")
@click.option("--threads", type=click.IntRange(min=1), show_default="one a processor", help="CPU threads.")
@json_option
def bench_command(
    engine: Path,
    documents: Path | None,
    rows: int | None,
    profile: bool,
    prompt_tokens: int,
    decode_tokens: int,
    slots: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure the speed or the quality of an engine.

    Without --profile or --perplexity: tokens per second of ENGINE as a CSV
    header and row, p50 and p99 in milliseconds a decode step.
    """
    if profile and documents is not None:
        raise click.UsageError("give --profile or --perplexity, not both")
    if rows is not None and documents is None:
        raise click.UsageError("--rows needs --perplexity")
    if profile and slots > 1:
        raise click.UsageError("--profile has one slot")
    with Engine.open(require_engine_file(engine), threads=available_threads(threads)) as opened:
        if documents is not None:
            _perplexity(opened, documents, rows, as_json)
        elif profile:
            found = profile_engine(opened, prompt_tokens, decode_tokens)
            print_json(found.to_dict()) if as_json else write_stdout(found.to_text() + "\n")
        else:
            speed = measure_speed(opened, prompt_tokens, decode_tokens, slots).to_dict()
            print_json(speed) if as_json else write_stdout(_csv(speed))


def _perplexity(engine: Engine, documents: Path, rows: int | None, as_json: bool) -> None:
    texts = read_texts(require_exists(documents, 'a file with one {"text": "..."} a line'))
    ids = token_rows(texts, Tokenizer(engine.tokenizer_files()), engine.info)[:rows]
    with stderr_progress() as progress:
        found = measure_perplexity(engine, ids, progress)
    print_json(found.to_dict()) if as_json else write_stdout(found.to_text() + "\n")


def _csv(row: dict[str, object]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(row), lineterminator="\n")
    writer.writeheader()
    writer.writerow(row)
    return text.getvalue()
