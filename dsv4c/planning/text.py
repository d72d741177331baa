"""A plan in words and tables."""

from collections.abc import Iterable, Sequence
from typing import Any

from dsv4c.planning.expert_budget import l2_text
from dsv4c.planning.tables import Section, context_text, size_text
from dsv4c.wording import counted

_SHOWN_REASONS = 2


def plan_sections(plan: dict[str, Any]) -> list[Section]:
    """Every table of a plan, in order."""
    sections = [_weights(plan), _state(plan), _capacity(plan), _splits(plan), _decode(plan), _kernels(plan)]
    return [*sections, *([_experts(plan)] if plan["experts"]["l2_bytes"] else []), _buckets(plan)]


def _section(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Sequence[str]],
    text_columns: int = 1,
    caption: Iterable[str] = (),
) -> Section:
    return Section(title, tuple(columns), tuple(map(tuple, rows)), text_columns, tuple(caption))


def summary_lines(plan: dict[str, Any]) -> list[str]:
    """What is planned: model, source, target, recipe."""
    return [*model_lines(plan), *target_lines(plan)]


def model_lines(plan: dict[str, Any]) -> list[str]:
    """The model, whatever the target."""
    model, source = plan["model"], plan["source"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in model["layers"].items())
    assumed = " (encodings assumed, as released)" if source["encodings_assumed"] else ""
    return [
        f"model    {model['name'] or 'a model of the DeepSeek-V4 architecture, none of the released ones'}",
        f"layers   {sum(model['layers'].values())}: {kinds}; {model['hash_routed_layers']} hash-routed; "
        f"{model['experts']} experts, {model['experts_per_token']} a token",
        f"weights  {source['tensors']:,} tensors, {source['payload_bytes']:,} bytes{assumed}",
    ]


def target_lines(plan: dict[str, Any]) -> list[str]:
    """The target and the recipe."""
    target, recipe = plan["target"], plan["recipe"]
    built = "" if target["can_build"] else "; cannot be built yet"
    bandwidth = target["measured_bandwidth"] or target["bandwidth"]
    measured = " measured" if target["measured_bandwidth"] else ""
    speed = f", {bandwidth / 1e9:,.0f} GB/s{measured}" if bandwidth else ""
    return [
        f"target   {target['name']}: {target['product']}, {size_text(target['memory_bytes'])}{speed}{built}",
        f"recipe   {recipe['numerics']} numerics, KV {recipe['kv']}, index keys {recipe['index_keys']}, "
        f"experts {recipe['weights']['experts']}, dense {recipe['weights']['dense']}",
    ]


def _weights(plan: dict[str, Any]) -> Section:
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
    return _section(
        "Weights",
        ("class", "stored as", "tensors", "bytes", "in the engine", "bytes"),
        rows,
        2,
        [weights_caption(plan)],
    )


def weights_caption(plan: dict[str, Any]) -> str:
    encodings = ", ".join(f"{row['encoding']} {size_text(row['size_bytes'])}" for row in plan["weights"]["encodings"])
    return f"tensors count scales; checkpoint by encoding: {encodings}"


def _state(plan: dict[str, Any]) -> Section:
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
    columns = ("context", "KV and state", "bytes/token", "without rollback rows")
    return _section("State of one sequence", columns, rows, caption=[state_caption(plan)])


def state_caption(plan: dict[str, Any]) -> str:
    state = plan["state"]
    counts = f", {state['session_bytes']:,} a session for routing counts" if state["session_bytes"] else ""
    return (
        f"{state['slot_bytes']:,} bytes a slot (of which {state['rollback_bytes']:,} for {state['rollback_rows']} "
        f"rows of rollback) and {state['bytes_per_token']:,.2f} a token{counts}"
    )


def _capacity(plan: dict[str, Any]) -> Section:
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
    return _section(f"Memory ({split})", ("", "bytes"), rows, caption=verdict_lines(plan))


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
            f"largest context with {counted(capacity['slots'], 'slot')}: {capacity['largest_context']:,}; "
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
            f"context up to {split['largest_context']:,}, or up to {counted(split['largest_slots'], 'slot')}"
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


def _splits(plan: dict[str, Any]) -> Section:
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
    caption = [f"on every rank: {plan['splits']['replicated']}"]
    return _section("Splits over devices", ("ranks", "", "weights each"), rows, 2, caption)


def _decode(plan: dict[str, Any]) -> Section:
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
                f"tokens/s, {counted(count, 'slot')}",
                *(speed_text(found[count, context]) for context in contexts),
            )
            for count in slots
        ]
    devices = decode["tp"] * decode["ep"]
    split = f", {devices} devices (tp {decode['tp']} x ep {decode['ep']})" if devices > 1 else ""
    title = f"Decoding, bound by bandwidth{split}"
    return _section(title, ("context", *map(context_text, contexts)), rows, caption=[decode_caption(plan)])


def decode_caption(plan: dict[str, Any]) -> str:
    return (
        "of all sequences together; experts as N uniform choices hit them; (x): does not fit"
        if plan["decode"]["bandwidth"]
        else "tokens/s: give --bandwidth GB/S, which differs from machine to machine"
    )


def speed_text(row: dict[str, Any]) -> str:
    """Tokens a second, in brackets where it does not fit."""
    if row["tokens_per_second"] is None:
        return "-"
    text = f"{row['tokens_per_second']:,.1f}"
    return text if row["fits"] else f"({text})"


def _kernels(plan: dict[str, Any]) -> Section:
    rows = [
        (use["kernel"], use["weights"] or "-", use["shape"], use["format"], f"{use['count']:,}")
        for use in plan["kernels"]
    ]
    title = "Kernels of a step" + ("" if plan["target"]["can_build"] else " (operators; no code for this target yet)")
    return _section(title, ("operator", "weights", "shape", "format", "launches"), rows, 4)


def _experts(plan: dict[str, Any]) -> Section:
    """Weights against the L2 cache; the kernels in the caption."""
    experts = plan["experts"]
    l2 = experts["l2_bytes"]
    sizes = [
        ("one expert", experts["one_bytes"]),
        *(
            (f"hit in a layer by {counted(hit['tokens'], 'token')}: {hit['experts']:.1f}", hit["size_bytes"])
            for hit in experts["hits"]
        ),
        (f"the {experts['experts']} of a layer", experts["layer_bytes"]),
        (f"all of {counted(experts['layers'], 'layer')}", experts["total_bytes"]),
    ]
    rows = [(what, size_text(size), f"{size / l2:,.2f}") for what, size in sizes]
    caption = [f"the L2 cache is {l2_text(l2)}; experts as uniform choices hit them", *experts["notes"]]
    caption += [
        f"{kernel['kernel']}: a block of {kernel['threads']} threads asks for {kernel['shared_bytes']:,} of "
        f"{kernel['most_shared_bytes']:,} bytes of shared memory; with {kernel['registers_of_sm']:,} registers an SM a "
        f"thread can have {kernel['most_registers']}"
        for kernel in experts["kernels"]
    ]
    return _section("Routed experts against the L2 cache", ("experts", "weights", "of L2"), rows, 1, caption)


def _buckets(plan: dict[str, Any]) -> Section:
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
    return _section("Buckets", ("rows", "launches", "arena", "bytes moved", "FLOPs"), rows)
