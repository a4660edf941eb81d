"""What was measured, as a picture: a panel of bars for each case, and lines for cost against the number of pieces."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._errors import OptionError
from ._case import OURS
from ._cases import CASES
from ._report import Results

_COLOURS = {OURS: "#c2410c", "plain loop": "#64748b", "scan by hand": "#64748b"}
_OTHERS = ("#a7c4df", "#4f83b5", "#c9ced6", "#d9b44a", "#efe0ae")


def require_plotting() -> Any:
    """Matplotlib, without a display, or an error that says what to install."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError('--plot needs matplotlib: pip install "wholebatch[bench]"') from None
    return Figure


def plot(results: Results, file: Path) -> None:
    """Draw all cases into a file; its suffix says the format.

    Args:
        results: the records.
        file: where to.
    """
    shown = {name: settings for name, settings in results.items() if any(r["contenders"] for r in settings.values())}
    columns = min(2, len(shown)) or 1
    rows = -(-len(shown) // columns) or 1
    figure = require_plotting()(figsize=(6.4 * columns, 3.4 * rows), layout="constrained")
    for axes, (name, settings) in zip(figure.subplots(rows, columns, squeeze=False).flat, shown.items(), strict=False):
        axes.set_title(f"({name}) {CASES[name].title}", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        (_lines if name == "g" else _bars)(axes, settings)
    for axes in figure.axes[len(shown) :]:
        axes.set_visible(False)
    figure.savefig(file, dpi=150)


def _bars(axes: Any, settings: Mapping[str, Any]) -> None:
    """Time over the baseline's: a group of bars for each setting, with quartiles."""
    names = list(dict.fromkeys(name for record in settings.values() for name in record["contenders"]))
    width = 0.8 / len(names)
    others = iter(_OTHERS)
    for i, name in enumerate(names):
        at = [(k, r["contenders"][name]) for k, r in enumerate(settings.values()) if name in r["contenders"]]
        ratios = [found["ratio"] for _, found in at]
        lows, highs = zip(*(found["ratio_quartiles"] for _, found in at), strict=True)
        below = [max(ratio - low, 0) for ratio, low in zip(ratios, lows, strict=True)]
        above = [max(high - ratio, 0) for ratio, high in zip(ratios, highs, strict=True)]
        colour = _COLOURS.get(name) or next(others)
        places = [k + (i - (len(names) - 1) / 2) * width for k, _ in at]
        axes.bar(places, ratios, width * 0.9, yerr=(below, above), color=colour, ecolor="#334155", label=name)
        for place, ratio, error in zip(places, ratios, above, strict=True):
            if name == OURS:
                text, top = f"{ratio:.2f}", (place, ratio + error)
                axes.annotate(text, top, (0, 3), textcoords="offset points", ha="center", fontsize=7)
    axes.axhline(1, color="#64748b", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(settings)), [_title(name, record) for name, record in settings.items()], fontsize=8)
    axes.set_ylabel(f"time over {names[0]}", fontsize=8)
    axes.legend(fontsize=7, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _title(name: str, record: Mapping[str, Any]) -> str:
    return f"micro-batch {name}" if name == str(record["micro_batch_size"]) else name


def _lines(axes: Any, settings: Mapping[str, Any]) -> None:
    """Time per row and peak memory against the number of pieces, both over what they are at 16 (or at the first)."""
    pieces = [int(name) for name in settings]
    start = settings.get("16") or next(iter(settings.values()))
    for name in next(iter(settings.values()))["contenders"]:
        found = [record["contenders"][name] for record in settings.values()]
        rows = [record["rows"] for record in settings.values()]
        base = start["contenders"][name]
        times = [f["seconds"] / r / (base["seconds"] / start["rows"]) for f, r in zip(found, rows, strict=True)]
        memory = [f["peak_bytes"] / max(base["peak_bytes"], 1) for f in found]
        colour = _COLOURS[name]
        axes.plot(pieces, times, "o-", color=colour, label=f"{name}: time per row", markersize=4)
        axes.plot(pieces, memory, "s--", color=colour, label=f"{name}: peak memory", markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(pieces, [str(count) for count in pieces], fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("pieces", fontsize=8)
    axes.set_ylabel("over that at 16 pieces", fontsize=8)
    axes.legend(fontsize=7, frameon=False, ncols=2)
