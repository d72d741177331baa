"""Charts of a plan as SVG, drawn by matplotlib (the extra `plan-html`)."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsv4c.errors import InputError
from dsv4c.planning.tables import context_text, size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinct also in greyscale order and for the colour-blind (after Okabe and Ito).
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "dsv4c",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}
_LIMIT, _GRID = "#b00020", "#e4e4e4"
_SHOWN_CLASSES = 3  # of weights, the largest; the others are drawn together
_FAR = 4.0


def _figure(width: float, height: float) -> "Figure":
    """An empty figure. Raises InputError where matplotlib is not installed."""
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "the charts of --html need the Python package matplotlib, which is not installed",
            hint="pip install 'dsv4c[plan-html]', or leave --html out",
        ) from None
    rcParams.update(_STYLE)
    return Figure(figsize=(width, height), layout="constrained")


def require_charts() -> None:
    """Raise InputError where the charts cannot be drawn."""
    _figure(1, 1)


def _svg(figure: "Figure", label: str) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = out.getvalue()
    return text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def memory_chart(plans: Sequence[dict[str, Any]]) -> str:
    """What fills one device, against its memory: as asked, and in the split that fits."""
    bars = [bar for plan in plans for bar in _bars(plan)]
    largest = max(sum(parts.values()) for _, parts, _ in bars)
    unit, scale = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    figure = _figure(9.2, 1.3 + 0.62 * len(bars))
    axes = figure.subplots()
    kinds = list(dict.fromkeys(kind for _, parts, _ in bars for kind in parts))
    colours = dict(zip(kinds, _COLOURS, strict=False))
    for row, (_, parts, memory) in enumerate(bars):
        left = 0.0
        for kind, size in parts.items():
            axes.barh(row, size / scale, 0.55, left / scale, color=colours[kind])
            left += size
        end = left
        # A memory far beyond the bars would leave nothing to see of them.
        if memory <= _FAR * largest:
            axes.plot([memory / scale] * 2, [row - 0.38, row + 0.38], color=_LIMIT, linewidth=2.2)
            end = max(left, memory)
        axes.annotate(
            f"{size_text(left)} of {size_text(memory)}",
            (end / scale, row),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    for kind in kinds:
        axes.barh(0, 0, color=colours[kind], label=kind)
    axes.plot([], [], color=_LIMIT, linewidth=2.2, label="memory of a device")
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} on one device")
    axes.margins(x=0.25)
    axes.set_xlim(left=0)
    axes.grid(axis="x", color=_GRID)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return _svg(figure, "memory of one device by what fills it")


def _bars(plan: dict[str, Any]) -> list[tuple[str, dict[str, float], int]]:
    """(label, part -> bytes, memory) as asked, and in the split that fits where that is another one."""
    capacity, name = plan["capacity"], plan["target"]["name"]
    devices = capacity["tp"] * capacity["ep"]
    bars = [(f"{devices} x {name}", capacity)]
    split = capacity["split"]
    if split is not None and not capacity["fits"]:
        bars.append((f"{split['devices']} x {name}\ntp {split['tp']}, ep {split['ep']}", split))
    return [(label, _parts(plan, at), at["memory_bytes"]) for label, at in bars]


def _parts(plan: dict[str, Any], at: dict[str, Any]) -> dict[str, float]:
    """Weights in large classes, scaled to what lies on the device; then what else does."""
    sizes: dict[str, float] = {}
    for row in plan["weights"]["engine_classes"]:
        sizes[row["class"]] = sizes.get(row["class"], 0) + row["size_bytes"]
    total = sum(sizes.values())
    large = sorted(sizes, key=lambda kind: -sizes[kind])[:_SHOWN_CLASSES]
    parts: dict[str, float] = {}
    for kind, size in sizes.items():
        key = kind if kind in large else "other weights"
        parts[key] = parts.get(key, 0) + size / total * at["weight_bytes"]
    parts["other weights"] = parts.pop("other weights", 0)
    return {
        **dict(sorted(parts.items(), key=lambda item: item[0] == "other weights")),
        "state": at["state_bytes"],
        "arena": at["arena_bytes"],
        "driver and system": at["reserved_bytes"],
    }


def state_chart(plans: Sequence[dict[str, Any]]) -> str:
    """State of one sequence over its length."""
    figure = _figure(5.2, 3.6)
    axes = figure.subplots()
    # Dashed where another line may lie below.
    for plan, colour, dash in zip(plans, _COLOURS, ("-", "--"), strict=False):
        state = plan["state"]
        longest = plan["model"]["max_context"]
        contexts = [size for size in (1 << bit for bit in range(8, 31)) if size <= longest] or [longest]
        sizes = [(state["slot_bytes"] + size * state["bytes_per_token"]) / 1e6 for size in contexts]
        label = f"{plan['target']['name']}: KV {plan['recipe']['kv']}, index keys {plan['recipe']['index_keys']}"
        axes.plot(contexts, sizes, dash, color=colour, marker="o", markersize=3, label=label)
    _contexts_axis(axes)
    axes.set_yscale("log", subs=[2, 5])
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(lambda value, _: f"{value:,g}")
    axes.set_ylabel("MB a sequence")
    axes.legend(frameon=False, fontsize=9)
    return _svg(figure, "state of one sequence over its length")


def _contexts_axis(axes: "Axes") -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: context_text(round(value)))
    axes.set_xlabel("positions")
    axes.grid(color=_GRID, which="major")


def speed_chart(plans: Sequence[dict[str, Any]]) -> str:
    """Tokens a second over the number of sequences, a line a context; dashed where it does not fit."""
    figure = _figure(5.2, 3.6)
    axes = figure.subplots()
    lines = 0
    for plan in plans:
        rows = [row for row in plan["decode"]["tokens_per_second"] if row["tokens_per_second"]]
        for context in sorted({row["context"] for row in rows}):
            line = [row for row in rows if row["context"] == context]
            fitting = [row for row in line if row["fits"]]
            colour = _COLOURS[lines % len(_COLOURS)]
            lines += 1
            axes.plot(
                [row["slots"] for row in line], [row["tokens_per_second"] for row in line], color=colour, linestyle=":"
            )
            devices = plan["decode"]["tp"] * plan["decode"]["ep"]
            axes.plot(
                [row["slots"] for row in fitting],
                [row["tokens_per_second"] for row in fitting],
                color=colour,
                marker="o",
                markersize=3.5,
                label=f"{devices} x {plan['target']['name']}, {context_text(context)}",
            )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("sequences")
    axes.set_ylabel("tokens/s, all sequences")
    axes.grid(color=_GRID)
    axes.legend(frameon=False, fontsize=9)
    return _svg(figure, "tokens a second over the number of sequences")


def roofline_chart(plans: Sequence[dict[str, Any]]) -> str:
    """Arithmetic intensity of decode steps under the roofs of one device."""
    figure = _figure(9.2, 4.0)
    axes = figure.subplots()
    for number, plan in enumerate(plans):
        decode, peak = plan["decode"], plan["target"]["flops"]
        bandwidth = decode["bandwidth"]
        if not bandwidth:
            continue
        colour = _COLOURS[number]
        edge = peak / bandwidth if peak else 1e3
        span = [0.5, edge, 3 * edge] if peak else [0.5, edge]
        roof = [min(x * bandwidth, peak or float("inf")) / 1e12 for x in span]
        rates = f"{bandwidth / 1e9:,.0f} GB/s" + (f", {peak / 1e12:,.0f} TFLOP/s" if peak else "")
        axes.plot(span, roof, color=colour, linewidth=1.8, label=f"{plan['target']['product']}: {rates}")
        devices = decode["tp"] * decode["ep"]
        flops = {row["context"]: row["flops_per_token"] for row in decode["contexts"]}
        for context, marker in zip(sorted(flops), "osD^v", strict=False):
            rows = [row for row in decode["tokens_per_second"] if row["context"] == context]
            x = [row["slots"] * flops[context] / devices / row["bytes_per_step"] for row in rows]
            y = [min(value * bandwidth, peak or float("inf")) / 1e12 for value in x]
            label = f"{plan['target']['name']}, decode at {context_text(context)}"
            axes.plot(x, y, marker, color=colour, markersize=4.5, fillstyle="none", label=label)
            # One plan's numbers are enough: they would overlap.
            if context == min(flops) and number == 0:
                for row, at, height in zip(rows, x, y, strict=True):
                    axes.annotate(
                        str(row["slots"]), (at, height), xytext=(5, -9), textcoords="offset points", fontsize=8
                    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("FLOPs a byte moved (numbers: sequences in the step)")
    axes.set_ylabel("TFLOP/s of one device")
    axes.grid(color=_GRID)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return _svg(figure, "arithmetic intensity of decode steps under the roofs of one device")
