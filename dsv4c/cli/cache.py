"""`dsv4c cache`: `list`, `clean` and `path`."""

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import click
from rich.console import Console

from dsv4c.cli.options import json_option, print_json, print_note
from dsv4c.cli.stdout import write_stdout
from dsv4c.errors import CacheError
from dsv4c.jit_caches.places import Place, chosen_kinds, find_places
from dsv4c.jit_caches.removal import Removal, remove_entries
from dsv4c.jit_caches.report import (
    Plan,
    counted_entries,
    mention,
    path_text,
    place_dict,
    plan_dict,
    plan_lines,
    removal_dict,
    removal_lines,
    size_text,
    survey_details,
    survey_dict,
    survey_row,
)
from dsv4c.jit_caches.selection import Cut, count_selected, make_cut
from dsv4c.jit_caches.surroundings import Surroundings
from dsv4c.jit_caches.survey import Survey, Tick, no_tick, real_paths, survey
from dsv4c.jit_caches.usage import usage_now
from dsv4c.planning.tables import Section, render
from dsv4c.wording import counted

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
# After so many seconds what was found before the question is looked up again.
_STALE_S = 10.0

_kinds_argument = click.argument("kinds", nargs=-1, metavar="[KIND]...")


def _age_ns(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.lower())
    if found is None:
        raise click.BadParameter(f"{text!r} is no age such as 12h, 30d or 8w", ctx, param)
    return int(float(found[1]) * _SECONDS[found[2]] * 1e9)


def _size_bytes(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]i?)?b?", text.lower())
    if found is None:
        raise click.BadParameter(f"{text!r} is no size such as 500M, 5G or 2Gi", ctx, param)
    return int(float(found[1]) * _BYTES[found[2] or ""])


@click.group("cache")
def cache_command() -> None:
    """List and clean the kernel caches of dsv4c and of the tools around it.

    Each kind of cache is known by its variables, its default places and the
    layout of its entries. What does not have that layout is never touched. The
    kinds: dsv4c, inductor, triton, tilelang, deep_gemm, flashinfer, vllm, sglang,
    cute_dsl, torch_extensions, cuda, hf_kernels.
    """


@cache_command.command("list")
@_kinds_argument
@json_option
def list_command(kinds: tuple[str, ...], as_json: bool) -> None:
    """Say what caches there are, how large, and whether they are in use.

    Of every KIND, or all. A size is what the files take on the disk; the newest
    use is the latest access or change of a file, as the file system has it.
    """
    places = _places(kinds)
    surveys = _survey(places)
    if as_json:
        print_json(
            {
                "disk_bytes": sum(each.disk_bytes for each in surveys),
                "caches": [survey_dict(each) for each in surveys],
            }
        )
        return
    rows = [each for each in surveys if mention(each) is None and (each.files or each.leftovers)]
    section = Section(
        "caches",
        ("kind", "place", "owner", "state", "entries", "files", "size", "newest use"),
        tuple(survey_row(each) for each in rows),
        text_columns=4,
        caption=tuple(survey_details(rows)),
    )
    total = f"total {size_text(sum(each.disk_bytes for each in rows))} in {counted(len(rows), 'cache')}"
    write_stdout(render([], [section] if rows else [], [total], terminal=sys.stdout.isatty()).lstrip("\n"))
    _print_mentions(surveys)


@cache_command.command("path")
@_kinds_argument
@json_option
def path_command(kinds: tuple[str, ...], as_json: bool) -> None:
    """Print where caches are: one path a line.

    For every KIND, or all: the folder that a tool would write to in this
    environment, and others of its folders that are there.
    """
    places = _places(kinds)
    if as_json:
        print_json({"places": [place_dict(place) for place in places]})
    else:
        with_kind = len({place.kind for place in places}) > 1
        write_stdout("".join(f"{place.kind:<18}" * with_kind + f"{path_text(place.path)}\n" for place in places))


@cache_command.command("clean")
@_kinds_argument
@click.option("--all", "everything", is_flag=True, help="Of all kinds, all entries.")
@click.option("--older-than", callback=_age_ns, metavar="AGE", help="Entries not used for so long: 12h, 30d, 8w.")
@click.option(
    "--keep-bytes",
    callback=_size_bytes,
    metavar="SIZE",
    help="The least recently used, until no more than SIZE is left: 5G.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def clean_command(
    kinds: tuple[str, ...],
    everything: bool,
    older_than: int | None,
    keep_bytes: int | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove entries of caches.

    Of every KIND, or of all kinds where --all, --older-than or --keep-bytes is
    given. Shows what it will remove and asks. Entries that are in use, belong to
    somebody else or hold something unknown are kept, and so is a cache that
    something is being written to.
    """
    limited = older_than is not None or keep_bytes is not None
    if everything and (kinds or limited):
        raise click.UsageError("--all stands alone: it removes every entry of every kind")
    if not (kinds or everything or limited):
        raise click.UsageError("say what to remove: a KIND, --older-than, --keep-bytes, or --all")
    places = [place for place in _places(kinds) if place.exists]
    surveys = [each for each in _survey(places) if each.skipped is None or each.files]
    cut = make_cut(surveys, time.time_ns(), older_than, keep_bytes)
    ties = cut.copy()
    plan = [(each, count_selected(each, ties)) for each in surveys]
    work = [
        (each, selected) for each, selected in plan if each.skipped is None and (selected.entries or each.leftovers)
    ]
    for each, _ in plan:
        if each.skipped is not None:
            print_note(f"{path_text(each.place.path)} is left alone: {path_text(each.skipped)}")
    if not work or dry_run:
        _print_plan(work, dry_run, as_json)
        return
    if not yes:
        asked = time.monotonic()
        _ask(work)
        if time.monotonic() - asked > _STALE_S:
            work = _still_to_do(work)
    removals, stopped = _remove([each.place for each, _ in work], cut)
    if as_json:
        print_json(_removals_dict(removals))
    else:
        write_stdout("\n".join(removal_lines(removals)) + "\n")
    if stopped:
        raise click.Abort
    failed = [reason for removal in removals for reason in removal.failed.examples]
    if failed:
        count = sum(removal.failed.count for removal in removals)
        raise CacheError(
            f"{counted_entries(count)} could not be removed: {path_text(failed[0])}",
            hint="check the permissions of the cache's folders, and run it again",
        )


def _places(kinds: tuple[str, ...]) -> list[Place]:
    return list(find_places(chosen_kinds(kinds), Surroundings.of_this_process()))


def _survey(places: list[Place]) -> list[Survey]:
    places = [place for place in places if place.exists]
    usage = usage_now(real_paths(places))
    with _counting() as count:
        return [survey(place, usage, count(f"counting {place.kind}")) for place in places]


def _print_mentions(surveys: list[Survey]) -> None:
    for each in surveys:
        text = mention(each)
        if text is not None:
            print_note(text)


def _print_plan(work: Plan, dry_run: bool, as_json: bool) -> None:
    if as_json:
        would = [plan_dict(each, selected) for each, selected in work]
        print_json({"dry_run": dry_run, "would_remove": would, **_removals_dict([])})
    elif work:
        write_stdout("\n".join([*plan_lines(work), "nothing was removed: this is a dry run"]) + "\n")
    else:
        write_stdout("nothing to remove\n")


def _still_to_do(work: Plan) -> Plan:
    """Without the caches that something began to write to while the question stood."""
    now = _survey([each.place for each, _ in work])
    for each in now:
        if each.skipped is not None:
            print_note(f"{path_text(each.place.path)} is left alone: {path_text(each.skipped)}")
    return [(new, selected) for new, (_, selected) in zip(now, work, strict=True) if new.skipped is None]


def _ask(work: Plan) -> None:
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError("nobody can be asked here: give --yes to remove without asking, or --dry-run")
    click.echo("\n".join(plan_lines(work)), err=True)
    if not click.confirm("remove them?", err=True):
        click.echo("nothing was removed", err=True)
        raise click.exceptions.Exit(0)


def _remove(places: list[Place], cut: Cut) -> tuple[list[Removal], bool]:
    removals: list[Removal] = []
    with _counting() as count, _interruption() as is_interrupted:
        for place in places:
            if is_interrupted():
                break
            removals.append(remove_entries(place, cut, count(f"removing {place.kind}"), is_interrupted))
        return removals, is_interrupted()


def _removals_dict(removals: list[Removal]) -> dict[str, object]:
    return {
        "files": sum(removal.files for removal in removals),
        "freed_bytes": sum(removal.freed_bytes for removal in removals),
        "removed": [removal_dict(removal) for removal in removals],
    }


@contextmanager
def _counting() -> Iterator[Callable[[str], Tick]]:
    """Makes a tick for each stage, which shows on stderr how many files it has had."""
    if not sys.stderr.isatty():
        yield lambda _: no_tick
        return
    with Console(stderr=True).status("") as status:

        def stage(name: str) -> Tick:
            files, shown = 0, 0

            def tick(more: int) -> None:
                nonlocal files, shown
                files += more
                if files - shown >= 1000:
                    shown = files
                    status.update(f"{name}: {files:,} files")

            status.update(name)
            return tick

        yield stage


@contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is asked for between two files, so that what was removed can be said; a second one ends at once."""
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, before)
