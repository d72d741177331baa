"""The tables at the end, from the rows."""

from collections.abc import Sequence

from tests.benchmarks.experts.manifest import Manifest
from tests.benchmarks.experts.rows import Row


def print_tables(rows: Sequence[Row], manifest: Manifest) -> None:
    print(f"\ncommit {manifest.commit}")
    for row in rows:
        if row["kind"] == "ceiling":
            print(f"{row['case']}: {row['note']}")
    _print_checks([row for row in rows if row["kind"] in ("check", "repeat")])
    _print_times([row for row in rows if row["kind"] == "time"])
    for title, kind in (("peers", "peer"), ("router's weights in L2", "resident")):
        _print_others(title, [row for row in rows if row["kind"] == kind])
    for row in rows:
        if row["kind"] == "error":
            print(f"error: {row['case']}: {row['note']}")


def _print_checks(rows: Sequence[Row]) -> None:
    if not rows:
        return
    bad = [row for row in rows if row.get("note") != "ok"]
    errors = [row["relative_error"] for row in rows if "relative_error" in row]
    by_row = [row["row_error"] for row in rows if "row_error" in row]
    worst = f", error {min(errors):.2e} to {max(errors):.2e}, of a row {max(by_row):.2e} at most" if errors else ""
    print(f"\nchecks: {len(rows)}, of which {len(bad)} failed{worst}")
    for row in bad:
        print(f"  {row['variant']} T={row['tokens']} {row['case']}: {row['note']}")


def _print_times(rows: Sequence[Row]) -> None:
    """A line for every number of rows and variant."""
    if not rows:
        return
    heads = ("variant", "T", "hit", "us all", "us experts", "% all", "% experts", "TFLOP/s", "MHz", "spread %")
    lines = [heads]
    for row in rows:
        name = row["variant"] if row["case"] == "uniform" else f"{row['variant']} ({row['case']})"
        lines.append(
            (
                name,
                str(row["tokens"]),
                f"{row['experts_hit']:.1f}",
                _us(row["us_all"]),
                _us(row["us_experts"]),
                _percent(row["read_share_all"]),
                _percent(row["read_share_experts"]),
                f"{row['tflop_per_s']:.1f}",
                str(row["sm_mhz"]),
                f"{100 * row['spread']:.1f}",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    print()
    for line in lines:
        print(
            "  ".join(
                text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))
            )
        )


def _print_others(title: str, rows: Sequence[Row]) -> None:
    if rows:
        print(f"\n{title}")
    for row in rows:
        time = row.get("us_all") or row.get("us_experts")
        where = f", T={row['tokens']}" if "tokens" in row else ""
        note = "" if row.get("note") in (None, "ok") else f" {row['note']}"
        print(f"  {row['case']}{where}:{f' {time:.2f} us' if time else ''}{note}")


def _us(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value or "-")


def _percent(value: object) -> str:
    return f"{100 * value:.1f}" if isinstance(value, float) else "-"
