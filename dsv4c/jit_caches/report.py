"""What `dsv4c cache` found and removed, for programs and in words."""

import pwd
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from dsv4c.jit_caches.places import Place
from dsv4c.jit_caches.removal import Removal
from dsv4c.jit_caches.selection import Selected
from dsv4c.jit_caches.survey import Survey
from dsv4c.wording import counted

Plan = list[tuple[Survey, Selected]]


def size_text(size: int) -> str:
    """Decimal units, as `--keep-bytes` takes them."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:,} B"


def path_text(path: str) -> str:
    """A path on one line, whatever is in it."""
    return "".join(character if character.isprintable() else _escaped(character) for character in path)


def _escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte that is no UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


def owner_text(owner: int) -> str:
    if owner < 0:
        return "?"
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return str(owner)


def state_text(survey: Survey) -> str:
    """Whether a cache is in use; why it is not looked into."""
    if survey.refusal is not None:
        return survey.refusal
    if survey.writing is not None:
        return "being written"
    if survey.entries_in_use:
        return f"{survey.entries_in_use:,} in use"
    return "" if survey.is_ours else "not yours"


def survey_row(survey: Survey) -> tuple[str, ...]:
    """kind, place, owner, state, entries, files, size, newest use."""
    newest = time.strftime("%Y-%m-%d %H:%M", time.localtime(survey.newest_use_ns / 1e9)) if survey.entries else "-"
    return (
        survey.place.kind,
        path_text(survey.place.path),
        owner_text(survey.owner),
        path_text(state_text(survey)),
        f"{survey.entries:,}",
        f"{survey.files:,}",
        size_text(survey.disk_bytes),
        newest,
    )


def survey_details(surveys: Iterable[Survey]) -> list[str]:
    """What a row has no room for."""
    lines = []
    for survey in surveys:
        where = f"{survey.place.kind}, {path_text(survey.place.path)}: "
        if survey.writing is not None:
            lines.append(where + path_text(survey.writing))
        elif survey.in_use is not None:
            lines.append(where + path_text(survey.in_use))
        if survey.leftovers:
            left = counted(survey.leftovers, "removal")
            lines.append(
                f"{where}{left} cut short, {size_text(survey.leftover_bytes)}; `dsv4c cache clean` finishes it"
            )
        if survey.refused.count:
            lines.append(f"{where}{_refused_text(survey.refused.count, survey.refused.examples)}")
    return lines


def _refused_text(count: int, examples: Sequence[str]) -> str:
    more = f", and {count - 1:,} more" if count > 1 else ""
    return f"left alone: {path_text(examples[0])}{more}"


def mention(survey: Survey) -> str | None:
    """Why a place that is there is no row; None where it is one, or is nothing to mention."""
    if survey.refusal is not None and survey.place.exists:
        return f"{path_text(survey.place.path)} {path_text(survey.refusal)}: left alone"
    if not survey.is_recognised and not survey.place.layout.is_shared:
        return f"{path_text(survey.place.path)} does not look like a cache of kind {survey.place.kind}: left alone"
    return None


def survey_dict(survey: Survey) -> dict[str, Any]:
    """The keys stay; more may come."""
    return {
        **place_dict(survey.place),
        "owner": owner_text(survey.owner),
        "recognised": survey.is_recognised,
        "refusal": survey.refusal,
        "entries": survey.entries,
        "files": survey.files,
        "disk_bytes": survey.disk_bytes,
        "apparent_bytes": survey.apparent_bytes,
        "newest_use": _iso(survey.newest_use_ns) if survey.entries else None,
        "in_use": survey.writing is not None or survey.entries_in_use > 0,
        "entries_in_use": survey.entries_in_use,
        "use": survey.writing or survey.in_use,
        "unfinished_removals": survey.leftovers,
        "left_alone": survey.refused.examples,
        "left_alone_count": survey.refused.count,
        "unrecognised": survey.others,
    }


def place_dict(place: Place) -> dict[str, Any]:
    return {"kind": place.kind, "path": place.path, "source": place.source, "exists": place.exists}


def _iso(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns // 10**9, UTC).isoformat().replace("+00:00", "Z")


def plan_lines(plan: Plan) -> list[str]:
    """What is about to be removed."""
    lines = []
    for survey, selected in plan:
        what = _amount(selected.entries, selected.files, selected.disk_bytes)
        if survey.leftovers:
            what += f", and {counted(survey.leftovers, 'removal')} to finish ({size_text(survey.leftover_bytes)})"
        lines.append(f"{survey.place.kind:<18}{what:<44}{path_text(survey.place.path)}")
    files, size = sum(each.files for _, each in plan), sum(each.disk_bytes for _, each in plan)
    return [*lines, f"to remove: {counted(files, 'file')}, {size_text(size)}"]


def plan_dict(survey: Survey, selected: Selected) -> dict[str, Any]:
    """The keys stay; more may come."""
    return {
        **place_dict(survey.place),
        "entries": selected.entries,
        "files": selected.files,
        "disk_bytes": selected.disk_bytes,
        "unfinished_removals": survey.leftovers,
    }


def _amount(entries: int, files: int, size: int) -> str:
    return f"{counted_entries(entries)}, {counted(files, 'file')}, {size_text(size)}"


def counted_entries(count: int) -> str:
    return f"{count:,} entry" if count == 1 else f"{count:,} entries"


def removal_lines(removals: Sequence[Removal]) -> list[str]:
    lines = []
    for removal in removals:
        what = _amount(removal.entries, removal.files, removal.freed_bytes)
        lines.append(f"{removal.place.kind:<18}{what:<44}{path_text(removal.place.path)}")
        notes = [removal.skipped] if removal.skipped is not None else []
        if removal.kept_in_use:
            notes.append(f"{counted_entries(removal.kept_in_use)} kept: in use")
        if removal.refused.count:
            notes.append(_refused_text(removal.refused.count, removal.refused.examples))
        if removal.failed.count:
            notes.append(f"not removed: {path_text(removal.failed.examples[0])} (of {removal.failed.count:,})")
        lines += [f"{'':<18}{path_text(note)}" for note in notes]
    files, freed = sum(removal.files for removal in removals), sum(removal.freed_bytes for removal in removals)
    return [*lines, f"removed {counted(files, 'file')}, freed {size_text(freed)}"]


def removal_dict(removal: Removal) -> dict[str, Any]:
    """The keys stay; more may come."""
    return {
        **place_dict(removal.place),
        "entries": removal.entries,
        "files": removal.files,
        "freed_bytes": removal.freed_bytes,
        "entries_kept_in_use": removal.kept_in_use,
        "skipped": removal.skipped,
        "left_alone": removal.refused.examples,
        "left_alone_count": removal.refused.count,
        "failed": removal.failed.examples,
        "failed_count": removal.failed.count,
    }
