"""A plan as text: tables for a terminal, plain where nobody watches."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 118
_SHOWN_REASONS = 2


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


def render(plans: Sequence[dict[str, Any]], terminal: bool) -> str:
    """One plan in full, or two side by side."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, force_terminal=terminal, no_color=not terminal, highlight=False)
    if len(plans) == 1:
        _full(console, plans[0])
    else:
        _comparison(console, plans)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    """The first `left` columns are text, the others numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _full(console: Console, plan: dict[str, Any]) -> None:
    for line in summary_lines(plan):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    for table, caption in (
        (_weights(plan), weights_caption(plan)),
        (_state(plan), state_caption(plan)),
        (_capacity(plan), "\n".join(verdict_lines(plan))),
        (_splits(plan), f"on every rank: {plan['splits']['replicated']}"),
        (_decode(plan), decode_caption(plan)),
        (_kernels(plan), ""),
        (_buckets(plan), ""),
    ):
        console.print(table)
        if caption:
            console.print(caption + "\n", markup=False, soft_wrap=True)
    for warning in plan["warnings"]:
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)


def summary_lines(plan: dict[str, Any]) -> list[str]:
    """What is planned: model, source, target, recipe."""
    model, source, target, recipe = plan["model"], plan["source"], plan["target"], plan["recipe"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in model["layers"].items())
    assumed = " (encodings assumed, as released)" if source["encodings_assumed"] else ""
    built = "" if target["can_build"] else "; cannot be built yet"
    bandwidth = target["measured_bandwidth"] or target["bandwidth"]
    speed = f", {bandwidth / 1e9:,.0f} GB/s" if bandwidth else ""
    measured = " measured" if target["measured_bandwidth"] else ""
    return [
        f"model    {model['name'] or 'a model of the DeepSeek-V4 architecture, none of the released ones'}",
        f"layers   {sum(model['layers'].values())}: {kinds}; {model['hash_routed_layers']} hash-routed; "
        f"{model['experts']} experts, {model['experts_per_token']} a token",
        f"weights  {source['tensors']:,} tensors, {source['payload_bytes']:,} bytes{assumed}",
        f"target   {target['name']}: {target['product']}, {size_text(target['memory_bytes'])}{speed}{measured}{built}",
        f"recipe   {recipe['numerics']} numerics, KV {recipe['kv']}, index keys {recipe['index_keys']}, "
        f"experts {recipe['weights']['experts']}, dense {recipe['weights']['dense']}",
    ]


def _weights(plan: dict[str, Any]) -> Table:
    """Checkpoint and engine side by side, a row a class."""
    weights = plan["weights"]
    classes = list(dict.fromkeys(row["class"] for row in weights["classes"]))
    rows = []
    for kind in [*classes, "constants"]:
        stored = [row for row in weights["classes"] if row["class"] == kind]
        engine = [row for row in weights["engine_classes"] if row["class"] == kind]
        rows.append(
            (
                kind,
                ", ".join(row["encoding"] for row in stored),
                f"{sum(row['tensors'] for row in stored):,}" if stored else "",
                f"{sum(row['size_bytes'] for row in stored):,}" if stored else "",
                ", ".join(row["encoding"] for row in engine) or "not compiled",
                f"{sum(row['size_bytes'] for row in engine):,}" if engine else "",
            )
        )
    engine_sum = sum(row["size_bytes"] for row in weights["engine_classes"])
    gaps = weights["engine_bytes"] - engine_sum
    rows.append(("alignment", "", "", "", "", f"{gaps:,}"))
    total_tensors = f"{plan['source']['tensors']:,}"
    rows.append(("total", "", total_tensors, f"{weights['payload_bytes']:,}", "", f"{weights['engine_bytes']:,}"))
    return _table("Weights", ("class", "stored as", "tensors", "bytes", "in the engine", "bytes"), rows, 2)


def weights_caption(plan: dict[str, Any]) -> str:
    encodings = ", ".join(f"{row['encoding']} {size_text(row['size_bytes'])}" for row in plan["weights"]["encodings"])
    return f"tensors count scales; checkpoint by encoding: {encodings}"


def _state(plan: dict[str, Any]) -> Table:
    state = plan["state"]
    rows = [
        (
            context_text(row["context"]),
            size_text(row["bytes"]),
            f"{row['bytes'] / row['context']:,.0f}",
            size_text(row["bytes_without_rollback"]),
        )
        for row in state["contexts"]
    ]
    return _table("State of one sequence", ("context", "KV and state", "bytes/token", "without rollback rows"), rows)


def state_caption(plan: dict[str, Any]) -> str:
    state = plan["state"]
    return (
        f"{state['slot_bytes']:,} bytes a slot (of which {state['rollback_bytes']:,} for {state['rollback_rows']} "
        f"rows of rollback) and {state['bytes_per_token']:,.2f} a token"
    )


def _capacity(plan: dict[str, Any]) -> Table:
    capacity, build = plan["capacity"], plan["build"]
    what = f"{capacity['slots']} x {context_text(capacity['context'])} positions"
    split = f"tp {capacity['tp']} x ep {capacity['ep']}, each device" if capacity["tp"] * capacity["ep"] > 1 else what
    rows = [
        ("weights", size_text(capacity["weight_bytes"])),
        (f"state, {what}", size_text(capacity["state_bytes"])),
        ("arena of the largest step", size_text(capacity["arena_bytes"])),
        ("kept by driver and system", size_text(capacity["reserved_bytes"])),
        ("needed", size_text(capacity["needed_bytes"])),
        ("memory", size_text(capacity["memory_bytes"])),
        ("margin", size_text(capacity["margin_bytes"])),
        ("engine file on disk", size_text(build["disk_bytes"])),
        ("memory of the build, about", size_text(build["memory_bytes"])),
        ("the same with --no-goldens", size_text(build["memory_bytes_without_goldens"])),
    ]
    return _table(f"Memory ({split})", ("", "bytes"), rows)


def verdict_lines(plan: dict[str, Any]) -> list[str]:
    """Does it fit, and if not, what would."""
    capacity, target = plan["capacity"], plan["target"]
    devices = capacity["tp"] * capacity["ep"]
    where = target["product"] if devices == 1 else f"{devices} x {target['product']}"
    used = capacity["needed_bytes"] / capacity["memory_bytes"]
    mapped = (
        ["the weights are mapped from the engine file: what does not fit is read from disk again for every token"]
        if target["name"] == "cpu"
        else []
    )
    if capacity["fits"]:
        return [
            f"FITS on {where}: {used:.1%} of memory used, margin {size_text(capacity['margin_bytes'])}",
            f"largest context with {capacity['slots']} slots: {capacity['largest_context']:,}; "
            f"most slots with {context_text(capacity['context'])} positions: {capacity['largest_slots']:,}",
        ]
    lines = [
        f"DOES NOT FIT on {where}: {used:.0%} of its memory, {size_text(-capacity['margin_bytes'])} too much",
        *mapped,
    ]
    count = capacity["devices_by_capacity"]
    draft = size_text(plan["weights"]["draft_bytes"])
    if count is None:
        lines.append("no number of devices helps: the state alone does not fit one; try a shorter context")
    elif devices == 1:
        lines.append(f"devices needed by capacity: {count} (with the draft module's {draft})")
    if (split := capacity["split"]) is not None:
        lines.append(
            f"smallest legal split that fits: {split['devices']} devices, tp {split['tp']} x ep {split['ep']}, "
            f"{size_text(split['needed_bytes'])} each, margin {size_text(split['margin_bytes'])}; "
            f"context up to {split['largest_context']:,}, slots up to {split['largest_slots']:,}"
        )
    if (part := capacity["one_device_holds"]) is not None and devices == 1:
        layers, experts = sum(plan["model"]["layers"].values()), plan["model"]["experts"]
        pruned = (
            f"all layers with {part['experts']} of {experts} experts each"
            if part["experts"] >= plan["model"]["experts_per_token"]
            else "no number of experts"
        )
        lines.append(f"one device would hold: the first {part['layers']} of {layers} layers, or {pruned}")
    return lines


def _splits(plan: dict[str, Any]) -> Table:
    rows = []
    for name in ("tp", "ep"):
        for row in plan["splits"][name]:
            if row["legal"]:
                answer = "fits" if row["fits"] else "does not fit"
                rows.append((f"{name} {row['ranks']}", answer, size_text(row["weight_bytes"])))
                continue
            reasons = row["reasons"]
            more = f"; {len(reasons) - _SHOWN_REASONS} more" if len(reasons) > _SHOWN_REASONS else ""
            rows.append((f"{name} {row['ranks']}", f"illegal: {'; '.join(reasons[:_SHOWN_REASONS])}{more}", ""))
    return _table("Splits over devices", ("ranks", "", "weights each"), rows, 2)


def _decode(plan: dict[str, Any]) -> Table:
    decode = plan["decode"]
    contexts = [row["context"] for row in decode["contexts"]]
    slots = sorted({row["slots"] for row in decode["tokens_per_second"]})
    found = {(row["slots"], row["context"]): row for row in decode["tokens_per_second"]}
    rows = [
        ("bytes a token, alone", *(size_text(row["bytes_per_token"]) for row in decode["contexts"])),
        ("FLOPs a token", *(f"{row['flops_per_token'] / 1e9:,.1f} G" for row in decode["contexts"])),
    ]
    if decode["bandwidth"]:
        rows += [
            (
                f"tokens/s, {count} slot{'s' if count > 1 else ''}",
                *(_speed(found[count, context]) for context in contexts),
            )
            for count in slots
        ]
    devices = decode["tp"] * decode["ep"]
    split = f", {devices} devices (tp {decode['tp']} x ep {decode['ep']})" if devices > 1 else ""
    return _table(f"Decoding, bound by bandwidth{split}", ("context", *map(context_text, contexts)), rows)


def decode_caption(plan: dict[str, Any]) -> str:
    return (
        "of all sequences together; experts as N uniform choices hit them; (x): does not fit"
        if plan["decode"]["bandwidth"]
        else "tokens/s: give --bandwidth GB/S, which differs from machine to machine"
    )


def _speed(row: dict[str, Any]) -> str:
    text = f"{row['tokens_per_second']:,.1f}"
    return text if row["fits"] else f"({text})"


def _kernels(plan: dict[str, Any]) -> Table:
    rows = [
        (use["kernel"], use["weights"] or "-", use["shape"], use["format"], f"{use['count']:,}")
        for use in plan["kernels"]
    ]
    title = "Kernels of a step" + ("" if plan["target"]["can_build"] else " (operators; no code for this target yet)")
    return _table(title, ("operator", "weights", "shape", "format", "launches"), rows, 4)


def _buckets(plan: dict[str, Any]) -> Table:
    rows = [
        (
            f"{row['kind']} {row['tokens']}",
            f"{row['launches']:,}",
            size_text(row["arena_bytes"]),
            size_text(row["bytes_moved"]),
            f"{row['flops'] / 1e9:,.1f} G",
        )
        for row in plan["buckets"]
    ]
    return _table("Buckets", ("rows", "launches", "arena", "bytes moved", "FLOPs"), rows)


def _comparison(console: Console, plans: Sequence[dict[str, Any]]) -> None:
    for line in (line for line in summary_lines(plans[0]) if not line.startswith(("target", "recipe"))):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    rows = [_comparison_row(name, plans, show) for name, show in _COMPARED]
    shown = [{(r["slots"], r["context"]): r for r in plan["decode"]["tokens_per_second"]} for plan in plans]
    for slots, context in shown[0]:
        name = f"tokens/s, {slots} x {context_text(context)}"
        rows.append(
            (name, *(_speed(at[slots, context]) if at[slots, context]["tokens_per_second"] else "-" for at in shown))
        )
    columns = ("", *(f"{plan['target']['name']} ({plan['target']['product']})" for plan in plans))
    console.print(_table("Two targets", columns, rows))
    for plan in plans:
        console.print(f"{plan['target']['name']}:", markup=False)
        for line in verdict_lines(plan):
            console.print(f"  {line}", markup=False, soft_wrap=True)


def _comparison_row(name: str, plans: Sequence[dict[str, Any]], show: Any) -> tuple[str, ...]:
    return (name, *(show(plan) for plan in plans))


_COMPARED: tuple[tuple[str, Any], ...] = (
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
