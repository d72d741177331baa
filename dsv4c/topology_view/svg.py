"""A topology as an SVG file that needs no other: SMs down, experts across, both phases of a step in their cells."""

import html
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from dsv4c.planning.tables import size_text
from dsv4c.topology_view.step import Step
from dsv4c.topology_view.text import groups_text
from dsv4c.wording import counted

# Pixels: a cell has the first phase above the second.
_HALF, _ROW = 4, 8
_LEFT, _TOP, _BAR, _GAP, _BOTTOM = 64, 92, 150, 20, 48
_MAP = 768  # about as wide as the experts are drawn, whatever their number
_HELD, _FIRST, _SECOND, _LINE, _TEXT, _FAINT = "#e3e9ef", "#0072b2", "#e69f00", "#c4ccd4", "#1b1f24", "#57606a"


def topology_svg(step: Step) -> str:
    """The whole file."""
    topology = step.topology
    cell = max(_MAP // topology.shapes.experts, 2)
    width = _LEFT + cell * topology.shapes.experts + _GAP + _BAR + _GAP
    height = _TOP + _ROW * topology.sm_count + _BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{html.escape(_title(step))}" font-family="Helvetica, Arial, sans-serif" '
        f'font-size="11" fill="{_TEXT}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_head(step),
        *_held(step, cell),
        *_work(step, cell),
        *_bars(step, _LEFT + cell * topology.shapes.experts + _GAP),
        *_axes(step, cell),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _title(step: Step) -> str:
    return f"layer {step.stored.layer}: {groups_text(step.stored)}"


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{" " + more if more else ""}>{html.escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"'
    return f"{shape}><title>{html.escape(title)}</title></rect>" if title else f"{shape}/>"


def _head(step: Step) -> Iterator[str]:
    yield _text(_LEFT, 24, _title(step), 'font-size="15" font-weight="bold"')
    yield _text(
        _LEFT,
        42,
        f"{counted(step.tokens, 'token')}, {step.origin}: {counted(len(step.hit), 'expert')} hit; the busiest SM reads "
        f"{size_text(max(step.read_bytes))} of weights, {step.imbalance:.2f} times the mean",
        f'fill="{_FAINT}"',
    )
    x = float(_LEFT)
    for colour, what in ((_HELD, "would compute"), (_FIRST, "first phase"), (_SECOND, "second phase")):
        yield _rect(x, 54, 10, 10, colour)
        yield _text(x + 14, 63, what)
        x += 34 + 6 * len(what)


def _held(step: Step, cell: int) -> Iterator[str]:
    """Each group's experts; neighbours are one rectangle."""
    topology = step.topology
    for group, (first, end) in enumerate(pairwise(topology.first_sm)):
        for start, stop in _runs(topology.experts_of(group)):
            name = f"expert {start}" if stop == start + 1 else f"experts {start} to {stop - 1}"
            yield _rect(
                _LEFT + cell * start,
                _TOP + _ROW * first,
                cell * (stop - start),
                _ROW * (end - first),
                _HELD,
                f"{name}: SMs {first} to {end - 1}",
            )


def _runs(experts: tuple[int, ...]) -> list[tuple[int, int]]:
    """Consecutive numbers as (first, one past the last)."""
    runs: list[tuple[int, int]] = []
    for expert in experts:
        if runs and runs[-1][1] == expert:
            runs[-1] = (runs[-1][0], expert + 1)
        else:
            runs.append((expert, expert + 1))
    return runs


def _work(step: Step, cell: int) -> Iterator[str]:
    names = ("first", "second")
    for sm, work in enumerate(step.works):
        for phase, units in enumerate(work):
            for expert, count in sorted(Counter(unit.expert for unit in units).items()):
                yield _rect(
                    _LEFT + cell * expert,
                    _TOP + _ROW * sm + _HALF * phase,
                    cell,
                    _HALF,
                    (_FIRST, _SECOND)[phase],
                    f"SM {sm}, expert {expert}, {names[phase]} phase: {counted(count, 'unit')}",
                )


def _bars(step: Step, left: int) -> Iterator[str]:
    """The weights that each SM reads, by phase, and their mean."""
    up, down = step.stored.unit_bytes
    scale = _BAR / max(*step.read_bytes, 1)
    for sm, work in enumerate(step.works):
        y, first, second = _TOP + _ROW * sm + 1, len(work.up) * up * scale, len(work.down) * down * scale
        label = f"SM {sm}: {len(work.up)} and {counted(len(work.down), 'unit')}, {size_text(step.read_bytes[sm])}"
        yield _rect(left, y, round(first, 2), _ROW - 2, _FIRST, label)
        yield _rect(round(left + first, 2), y, round(second, 2), _ROW - 2, _SECOND, label)
    x, end = round(left + step.mean_bytes * scale, 2), _TOP + _ROW * step.topology.sm_count
    yield f'<path d="M{x:g} {_TOP - 4}V{end + 4}" stroke="{_TEXT}" stroke-dasharray="3 2"/>'
    yield _text(left, _TOP - 8, "weights read")
    yield _text(left, end + 16, f"mean {size_text(step.mean_bytes)}", f'fill="{_FAINT}"')


def _axes(step: Step, cell: int) -> Iterator[str]:
    topology = step.topology
    experts, end = topology.shapes.experts, _TOP + _ROW * topology.sm_count
    yield f'<path d="M{_LEFT} {_TOP}V{end}H{_LEFT + cell * experts}" fill="none" stroke="{_LINE}"/>'
    right = 'text-anchor="end"'
    for sm in sorted({*range(0, topology.sm_count, 12), topology.sm_count - 1}):
        # The last one is left out where it would lie over its neighbour.
        if sm % 12 == 0 or sm % 12 > 2:
            yield _text(_LEFT - 6, _TOP + _ROW * sm + 8, str(sm), right)
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128) if step * cell >= 24)
    for expert in range(0, experts, every):
        yield _text(_LEFT + cell * (expert + 0.5), end + 14, str(expert), 'text-anchor="middle"')
    yield _text(_LEFT + cell * experts / 2, end + 34, "expert", 'text-anchor="middle"')
    middle = _TOP + _ROW * topology.sm_count / 2
    yield _text(18, middle, "SM", f'transform="rotate(-90 18 {middle:g})" text-anchor="middle"')
