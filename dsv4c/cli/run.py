"""`dsv4c run`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from dsv4c.chat import encode_chat
from dsv4c.cli.options import available_threads, json_option, print_json, print_note, require_engine_file
from dsv4c.cli.stdout import write_stdout
from dsv4c.engine.reader import is_engine
from dsv4c.errors import InputError
from dsv4c.generation import GenerationLimits, IdOutput, TextOutput, generate, room_for
from dsv4c.routing_trace import format_trace
from dsv4c.runtime.engine import Engine
from dsv4c.runtime.session import RoutingCounts, Sampling, require_counts
from dsv4c.text import Tokenizer

_PATH = click.Path(path_type=Path)
# Parameter -> option: what only counts where tokens are drawn.
_SAMPLING_OPTIONS = {"top_k": "--top-k", "top_p": "--top-p", "seed": "--seed"}


@click.command("run")
@click.argument("engine", type=_PATH)
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=_PATH, metavar="FILE", help="Read the prompt from FILE, as it is.")
@click.option("--chat", is_flag=True, help="The prompt is a message: encode it as the model's chat format has it.")
@click.option("--system", metavar="TEXT", help="The system text of the chat.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Longest answer.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="0: the likeliest token, whatever the next three say.",
)
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="0: all tokens.")
@click.option(
    "--top-p", type=click.FloatRange(min=0, max=1, min_open=True), default=1.0, show_default=True, help="1: all tokens."
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of the random numbers.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before TEXT. May be given several times.")
@click.option("--ids", is_flag=True, help="The prompt and the answer are token ids, separated by spaces.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    show_default="one a processor",
    help="CPU threads, at most one a processor.",
)
@click.option(
    "--context", type=click.IntRange(min=1), show_default="prompt and answer", help="Positions to make room for."
)
@click.option(
    "--routing-counts",
    type=_PATH,
    metavar="FILE",
    help="Write how often each expert was chosen to FILE, a `trace` for recipes; ENGINE is one built to count.",
)
@json_option
def run_command(
    engine: Path,
    prompt: str | None,
    prompt_file: Path | None,
    chat: bool,
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    stop: tuple[str, ...],
    ids: bool,
    threads: int | None,
    context: int | None,
    routing_counts: Path | None,
    as_json: bool,
) -> None:
    """Generate text from a prompt.

    PROMPT is the text to continue, or - to read it from stdin. The answer is
    streamed to stdout; speeds go to stderr. Weights are not checked at every
    run: `dsv4c verify` does that.
    """
    _refuse_text_options_with_ids(ids, chat, stop)
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    if temperature == 0:
        _note_options_without_effect(click.get_current_context())
    text = _read_prompt(prompt, prompt_file)
    limits = GenerationLimits(max_tokens, context)
    counts: list[RoutingCounts] = []
    with Engine.open(require_engine_file(engine), threads=available_threads(threads)) as opened:
        if routing_counts is not None:
            require_counts(opened.info.counted_layers)
            _check_counts_file(routing_counts)
        output: TextOutput | IdOutput
        if ids:
            prompt_ids, output = _parse_ids(text, opened.info.bos_token_id), IdOutput()
        else:
            tokenizer = Tokenizer(opened.tokenizer_files())
            prompt_ids = _encode(tokenizer, text, chat, system, opened.info.bos_token_id)
            output = TextOutput(tokenizer, stop)
        room = room_for(opened, prompt_ids, limits)
        if room.max_tokens < max_tokens:
            print_note(f"at most {room.max_tokens} tokens of answer: the context is {room.context} tokens")
        result = generate(
            opened,
            prompt_ids,
            limits,
            # No more than all tokens: larger numbers need not fit the runtime's 32 bits.
            Sampling(temperature=temperature, top_k=min(top_k, opened.info.vocab_size), top_p=top_p, seed=seed),
            output,
            emit=_discard if as_json else write_stdout,
            take_counts=counts.append if routing_counts is not None else None,
        )
    if routing_counts is not None:
        _write_counts(routing_counts, counts[0])
    if as_json:
        print_json(result.to_dict())
        return
    if sys.stdout.isatty():
        # For the eye; a file or a program gets the text and nothing else.
        write_stdout("\n")
    click.echo(result.to_text(), err=True)


def _note_options_without_effect(context: click.Context) -> None:
    given = [
        option
        for name, option in _SAMPLING_OPTIONS.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    if given:
        print_note(f"{', '.join(given)} without effect: at temperature 0 the likeliest token is taken")


def _refuse_text_options_with_ids(ids: bool, chat: bool, stop: Sequence[str]) -> None:
    if ids and (chat or stop):
        raise click.UsageError("--ids takes no --chat or --stop: they are about text")


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give a PROMPT or --prompt-file, not both")
    if prompt is None and prompt_file is None:
        raise click.UsageError("give a PROMPT, or --prompt-file, or - to read stdin")
    if prompt is not None and prompt != "-":
        return _as_utf8(os.fsencode(prompt), "the command line")
    source = "stdin" if prompt_file is None else str(prompt_file)
    if prompt_file is not None:
        return _as_utf8(prompt_file.read_bytes(), source)
    if sys.stdin is None:
        raise InputError("stdin is closed", hint="give a PROMPT or --prompt-file")
    return _as_utf8(sys.stdin.buffer.read(), source)


def _as_utf8(data: bytes, source: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"the prompt from {source} is not UTF-8: {error.reason} at byte {error.start}",
            hint="convert it, as with `iconv -t UTF-8`",
        ) from None


def _parse_ids(text: str, bos_token_id: int | None) -> list[int]:
    """The ids as they are; where there are none, the begin token, as for an empty text."""
    words = text.split()
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise InputError(
            f"with --ids the prompt is whole numbers separated by spaces, and {wrong!r} is none",
            hint='for example "0 35 79"; leave --ids out to give text',
        )
    return [int(word) for word in words] if words or bos_token_id is None else [bos_token_id]


def _encode(tokenizer: Tokenizer, text: str, chat: bool, system: str | None, bos_token_id: int | None) -> list[int]:
    if chat:
        prompt = encode_chat(tokenizer, text, system=system, bos_token_id=bos_token_id)
        if prompt.note is not None:
            print_note(prompt.note)
        return prompt.token_ids
    token_ids = tokenizer.encode(text)
    # The model was trained on documents that begin with this token; a prompt may have it written out already.
    return token_ids if bos_token_id is None or token_ids[:1] == [bos_token_id] else [bos_token_id, *token_ids]


def _check_counts_file(path: Path) -> None:
    """What can be known to go wrong is said before the answer is generated."""
    if path.is_file() and is_engine(path):
        raise InputError(f"{path} is an engine; the counts would replace it", hint="name another file")
    place = path if path.exists() else path.parent
    if path.is_dir() or not place.exists() or not os.access(place, os.W_OK):
        raise _unwritable(path, "it is a folder" if path.is_dir() else f"{place} is not there or read-only")


def _write_counts(path: Path, found: RoutingCounts) -> None:
    layers = dict(zip(found.layers, found.counts.tolist(), strict=True))
    try:
        path.write_text(format_trace(found.counts.shape[1], layers), encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error.strerror) from None


def _unwritable(path: Path, reason: str | None) -> InputError:
    return InputError(f"cannot write {path}: {reason}", hint="name a file in a folder that can be written to")


def _discard(text: str) -> None:
    """With --json the text comes in one piece at the end."""
