"""A topology for a terminal: a row a group of SMs, a column a few experts."""

import io
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, pairwise

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsv4c.planning.tables import size_text
from dsv4c.topology_view.step import Step
from dsv4c.topology_view.stored import StoredTopology
from dsv4c.wording import counted

# Of a striped topology, SMs that share a row.
_STRIPED_SMS = 4
_HELD, _BUSY = "░", "█"
# From this width on there is room for the less important columns.
_WIDE = 76
_NARROWEST = 40


@dataclass(frozen=True)
class _Row:
    """SMs that are drawn together: `held` are the experts they may compute, `busy` those they do."""

    first: int
    end: int
    held: frozenset[int]
    busy: frozenset[int]


def topology_text(step: Step, width: int, terminal: bool) -> str:
    """The drawing; with the colours of a terminal or as plain text."""
    out = io.StringIO()
    width = max(width, _NARROWEST)
    console = Console(file=out, width=width, force_terminal=terminal, no_color=not terminal, highlight=False)
    for name, line in (*_facts(step.stored), *_load(step)):
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=8)
        table.add_column(overflow="fold")
        table.add_row(name, Text(line))
        console.print(table)
    console.print()
    console.print(_map(step, width))
    console.print(Text(f"{_HELD} would compute an expert of the column, {_BUSY} computes one in this step"))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def groups_text(stored: StoredTopology) -> str:
    """`pinned, 28 groups of 4 or 5 SMs, each with 9 to 10 experts`."""
    topology = stored.topology
    if topology.groups == 1:
        return f"{topology.name}, all {topology.sm_count} SMs share every expert"
    sizes = " or ".join(str(size) for size in sorted(set(topology.group_sms)))
    held = [len(topology.experts_of(group)) for group in range(topology.groups)]
    groups = f"{topology.groups} groups of {sizes} SMs on a card of {topology.sm_count}"
    return f"{topology.name}, {groups}, {_span(held)} {'expert' if max(held) == 1 else 'experts'} each"


def _facts(stored: StoredTopology) -> list[tuple[str, str]]:
    facts, topology = stored.facts, stored.topology
    trace = f", trace {facts['trace'][:16]}" if facts["trace"] else ""
    return [
        ("layer", f"{stored.layer}, routed by {stored.choice}"),
        ("topology", f"{groups_text(stored)}{trace}"),
        (
            "experts",
            f"{facts['experts']}, {facts['per_token']} a token; {facts['format']}, "
            f"{size_text(facts['expert_bytes'])} each, in {topology.shapes.up_panels} units of the first phase and "
            f"{topology.shapes.down_panels} of the second",
        ),
    ]


def _load(step: Step) -> list[tuple[str, str]]:
    return [
        (
            "step",
            f"{counted(step.tokens, 'token')}, {step.origin}: {counted(len(step.hit), 'expert')} hit, "
            f"{counted(step.places, 'place')} of up to {counted(step.place_pairs, 'pair')}",
        ),
        (
            "units",
            f"first phase {_span(len(work.up) for work in step.works)} an SM, second "
            f"{_span(len(work.down) for work in step.works)}",
        ),
        (
            "weights",
            f"the busiest SM reads {size_text(max(step.read_bytes))}, "
            f"{step.imbalance:.2f} times the mean of {size_text(step.mean_bytes)}",
        ),
    ]


def _span(counts: Iterable[int]) -> str:
    found = sorted(set(counts))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _rows(step: Step) -> list[_Row]:
    topology = step.topology
    borders = list(topology.first_sm)
    if topology.groups == 1:
        borders = [*range(0, topology.sm_count, _STRIPED_SMS), topology.sm_count]
    return [
        _Row(
            first,
            end,
            frozenset(topology.experts_of(topology.seat(first)[0])),
            frozenset(unit.expert for work in step.works[first:end] for phase in work for unit in phase),
        )
        for first, end in pairwise(borders)
    ]


def _map(step: Step, width: int) -> Table:
    rows, experts, wide = _rows(step), step.topology.shapes.experts, width >= _WIDE
    cells = [_cells(step, row, wide) for row in rows]
    heads = ["SMs", "first", "second", *(["held", "hit", "most read"] if wide else [])]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    room = max(width - sum(widths) - 2 * len(widths), 4)
    binned = -(-experts // room)
    title = f"{experts} experts" + (f", {binned} a column" if binned > 1 else "")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("SMs")
    table.add_column(Text(title, overflow="ellipsis", no_wrap=True), width=-(-experts // binned))
    for head in heads[1:]:
        table.add_column(head, justify="right")
    for row, (name, *numbers) in zip(rows, cells, strict=True):
        table.add_row(name, _line(row, experts, binned), *numbers)
    return table


def _cells(step: Step, row: _Row, wide: bool) -> list[str]:
    works = step.works[row.first : row.end]
    last = row.end - 1
    cells = [
        str(row.first) if last == row.first else f"{row.first}-{last}",
        _span(len(work.up) for work in works).replace(" to ", "-"),
        _span(len(work.down) for work in works).replace(" to ", "-"),
    ]
    if wide:
        cells += [str(len(row.held)), str(len(row.busy)), size_text(max(step.read_bytes[row.first : row.end]))]
    return cells


def _line(row: _Row, experts: int, binned: int) -> Text:
    cells = [
        _BUSY if not row.busy.isdisjoint(here) else " " if row.held.isdisjoint(here) else _HELD
        for here in (range(start, min(start + binned, experts)) for start in range(0, experts, binned))
    ]
    runs = ((cell, "".join(same)) for cell, same in groupby(cells))
    styled = ((run, "bold cyan" if cell == _BUSY else "dim") for cell, run in runs)
    return Text.assemble(*styled, no_wrap=True, overflow="crop")
