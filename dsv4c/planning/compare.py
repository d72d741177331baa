"""Two plans side by side."""

from collections.abc import Callable, Sequence
from typing import Any

from dsv4c.planning.tables import Section, context_text, size_text
from dsv4c.planning.text import speed_text, verdict_lines


def comparison(plans: Sequence[dict[str, Any]]) -> Section:
    """What differs between two targets, a column each."""
    rows = [(name, *map(show, plans)) for name, show in _COMPARED]
    shown = [{(r["slots"], r["context"]): r for r in plan["decode"]["tokens_per_second"]} for plan in plans]
    for slots, context in shown[0]:
        name = f"tokens/s, {slots} x {context_text(context)}"
        rows.append((name, *(speed_text(at[slots, context]) for at in shown)))
    columns = ("", *(f"{plan['target']['name']} ({plan['target']['product']})" for plan in plans))
    verdicts = [f"{plan['target']['name']}: {line}" for plan in plans for line in verdict_lines(plan)]
    return Section("Two targets", columns, tuple(rows), 1, tuple(verdicts))


_COMPARED: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("memory", lambda plan: size_text(plan["target"]["memory_bytes"])),
    ("bandwidth", lambda plan: size_text(plan["decode"]["bandwidth"]) + "/s" if plan["decode"]["bandwidth"] else "-"),
    (
        "numerics, KV, index keys",
        lambda plan: ", ".join(plan["recipe"][key] for key in ("numerics", "kv", "index_keys")),
    ),
    ("weights", lambda plan: size_text(plan["weights"]["engine_bytes"])),
    ("state of the slots asked for", lambda plan: size_text(plan["capacity"]["state_bytes"])),
    ("state a token", lambda plan: f"{plan['state']['bytes_per_token']:,.2f} B"),
    ("arena", lambda plan: size_text(plan["capacity"]["arena_bytes"])),
    ("needed", lambda plan: size_text(plan["capacity"]["needed_bytes"])),
    ("margin", lambda plan: size_text(plan["capacity"]["margin_bytes"])),
    ("fits one device", lambda plan: "yes" if plan["capacity"]["devices_by_capacity"] == 1 else "no"),
    ("devices by capacity", lambda plan: str(plan["capacity"]["devices_by_capacity"] or "-")),
    ("largest context", lambda plan: f"{plan['capacity']['largest_context']:,}"),
    ("most slots", lambda plan: f"{plan['capacity']['largest_slots']:,}"),
    ("tokens/s counted on", lambda plan: f"{plan['decode']['tp'] * plan['decode']['ep']} devices"),
)
