"""Tables of a plan as data, how they look in a terminal, and how numbers are written in them."""

import io
from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 118


@dataclass(frozen=True)
class Section:
    """A table: the first `text_columns` are text, the others numbers; `caption` are lines below it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1
    caption: tuple[str, ...] = ()


def size_text(size: float | None) -> str:
    """Decimal units, as memory and bandwidth are sold."""
    if size is None:
        return "-"
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:,.0f} B"


def context_text(context: int) -> str:
    """`8K`, `128K`, `1M`; other numbers as they are."""
    for unit, scale in (("M", 1 << 20), ("K", 1 << 10)):
        if context >= scale and context % scale == 0:
            return f"{context // scale}{unit}"
    return f"{context:,}"


def render(head: Iterable[str], sections: Iterable[Section], tail: Iterable[str], terminal: bool) -> str:
    """Lines, tables, lines; with the colours of a terminal or as plain text."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, force_terminal=terminal, no_color=not terminal, highlight=False)
    _print_lines(console, [*head, ""])
    for section in sections:
        console.print(_table(section))
        if section.caption:
            _print_lines(console, [*section.caption, ""])
    _print_lines(console, tail)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _table(section: Section) -> Table:
    table = Table(title=section.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(section.columns):
        table.add_column(column, justify="left" if number < section.text_columns else "right", overflow="fold")
    for row in section.rows:
        # As text: the brackets of shapes are no styles.
        table.add_row(*map(Text, row))
    return table
