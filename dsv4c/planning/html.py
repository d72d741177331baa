"""A plan as one page that needs no other file: charts as inline SVG, the tables of the terminal below them."""

import html
from collections.abc import Sequence
from typing import Any

from dsv4c.planning.charts import memory_chart, roofline_chart, speed_chart, state_chart
from dsv4c.planning.compare import comparison
from dsv4c.planning.tables import Section
from dsv4c.planning.text import model_lines, plan_sections, target_lines, verdict_lines
from dsv4c.version import VERSION

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, "Helvetica Neue", Arial, sans-serif; color: #1b1f24; background: #fff;
  max-width: 1080px; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid #d8dee4; padding-bottom: .25rem; }
.facts { margin: .4rem 0; color: #424a53; }
.facts b { display: inline-block; min-width: 5rem; font-weight: 600; color: #1b1f24; }
.verdict { border-left: 4px solid #1a7f37; background: #eef8f0; padding: .6rem .9rem; margin: 1rem 0; }
.verdict.no { border-color: #b00020; background: #fdf0f1; }
.verdict p { margin: .15rem 0; }
.charts { display: grid; grid-template-columns: 1fr 1fr; gap: .5rem 1.5rem; }
.charts figure.wide { grid-column: 1 / -1; }
figure { margin: 0; }
figcaption { font-weight: 600; margin-bottom: .2rem; }
svg { width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th { text-align: right; border-bottom: 2px solid #afb8c1; padding: .25rem .8rem .25rem 0; white-space: nowrap; }
td { text-align: right; border-bottom: 1px solid #eaeef2; padding: .22rem .8rem .22rem 0; vertical-align: top; }
th.text, td.text { text-align: left; }
.caption { font-size: .88rem; color: #57606a; margin: .3rem 0; }
footer { margin-top: 2.5rem; font-size: .82rem; color: #57606a; }
@media (max-width: 760px) { .charts { grid-template-columns: 1fr; } }
"""


def plan_page(plans: Sequence[dict[str, Any]]) -> str:
    """The page of one plan, or of two side by side. Raises InputError where matplotlib is not installed."""
    first = plans[0]
    title = first["model"]["name"] or "A model of the DeepSeek-V4 architecture"
    targets = " and ".join(plan["target"]["product"] for plan in plans)
    sections = [comparison(plans)] if len(plans) > 1 else []
    for plan in plans:
        name = f"{plan['target']['name']}: " if len(plans) > 1 else ""
        sections += [_named(section, name) for section in plan_sections(plan)]
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        *(_facts(line) for line in (*model_lines(first), *(line for plan in plans for line in target_lines(plan)))),
        *map(_verdict, plans),
        "<h2>Charts</h2>",
        _charts(plans),
        *map(_section, sections),
        *(f'<p class="caption">warning: {html.escape(warning)}</p>' for warning in first["warnings"]),
        f"<footer>dsv4c {VERSION} plan, from config and headers alone. GB are 10^9 bytes.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)} on {html.escape(targets)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _named(section: Section, name: str) -> Section:
    return Section(name + section.title, section.columns, section.rows, section.text_columns, section.caption)


def _facts(line: str) -> str:
    key, _, rest = line.partition(" ")
    return f'<p class="facts"><b>{html.escape(key)}</b> {html.escape(rest.strip())}</p>'


def _verdict(plan: dict[str, Any]) -> str:
    kind = "verdict" if plan["capacity"]["fits"] else "verdict no"
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in verdict_lines(plan))
    return f'<div class="{kind}">{lines}</div>'


def _charts(plans: Sequence[dict[str, Any]]) -> str:
    figures = [_chart("Memory", memory_chart(plans), wide=True), _chart("State of a sequence", state_chart(plans))]
    if any(plan["decode"]["bandwidth"] for plan in plans):
        figures.append(_chart("Decoding, bound by bandwidth", speed_chart(plans)))
        figures.append(_chart("Roofline of decoding", roofline_chart(plans), wide=True))
    return f'<div class="charts">{"".join(figures)}</div>'


def _chart(title: str, svg: str, *, wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}><figcaption>{html.escape(title)}</figcaption>{svg}</figure>"


def _section(section: Section) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{kind}>{html.escape(cell)}</{tag}>"
            for number, cell in enumerate(row)
            for kind in [' class="text"' if number < section.text_columns else ""]
        )

    rows = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in section.rows)
    captions = "".join(f'<p class="caption">{html.escape(line)}</p>' for line in section.caption)
    return (
        f"<h2>{html.escape(section.title)}</h2>\n"
        f'<div class="scroll"><table>\n<thead><tr>{cells(section.columns, "th")}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>{captions}"
    )
