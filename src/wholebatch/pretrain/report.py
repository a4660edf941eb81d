"""`report.html`: what came of a run, on one page that needs nothing else, made from the run's files."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from .._budget import in_units
from .charts import Chart, Line, Point
from .files import write_text
from .folder import Folder
from .metrics import Record, read
from .settings import option, shown
from .summary import Facts, clock, figures

Row = tuple[str, ...]


def write_report(folder: Folder) -> None:
    """Write the page of a run that has a summary."""
    write_text(folder.report, page(folder.read_summary(), list(read(folder.metrics)), folder.read_comparison()))


def page(summary: Facts, records: Sequence[Record], comparison: Facts) -> str:
    """The page.

    Args:
        summary: what came of the run.
        records: its metrics.
        comparison: with the unsplit batch and the textbook loop, if that was made.
    """
    settings = summary["settings"]
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    title = f"{settings['batch_size']} rows, {summary['micro_batch_size']} at a time"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>wholebatch train: {escape(title)}</title>",
            f"<style>\n{style}</style></head><body><main>",
            f"<h1>{escape(title)}</h1>",
            f'<p class="soft">{escape(_what(summary))}</p>',
            f'<div class="grid-of-tiles">{"".join(_tiles(summary))}</div>',
            f'<div class="grid-of-cards">{"".join(_charts(summary, records))}</div>',
            *([_comparison(comparison)] if comparison else []),
            _sample(summary["sample"]),
            _configuration(summary),
            "</main></body></html>\n",
        ]
    )


def _what(summary: Facts) -> str:
    frameworks = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    return (
        f"A GPT with {summary['parameters']:,} parameters, trained for {summary['step']:,} steps on "
        f"{summary['tokens']:,} tokens of {summary['text_name']} ({summary['device']}, {frameworks})."
    )


def _tiles(summary: Facts) -> list[str]:
    exactness, peak = summary["exactness"], summary["peak_memory"]
    exact = exactness["exact"]
    return [
        _tile(
            "Validation loss",
            f"{summary['loss_before']:.3f} → {summary['loss_after']:.3f}",
            "before and after, on text that was held out",
        ),
        _tile(
            "Peak memory",
            "not known" if peak is None else in_units(peak),
            f"the whole batch would have needed {in_units(summary['whole_batch_memory'])}",
        ),
        _tile(
            "Gradient of the whole batch",
            f'<span class="{"good" if exact else "bad"}">{"exact" if exact else "NOT exact"}</span>',
            f"off by {exactness['error']:.1e} of the largest entry, in {exactness['dtype']}",
        ),
        _tile(
            "Throughput",
            f"{summary['tokens_per_second']:,.0f} tokens/s",
            f"{clock(summary['seconds'])} of training",
        ),
    ]


def _charts(summary: Facts, records: Sequence[Record]) -> list[str]:
    settings = summary["settings"]
    validation = [(0.0, summary["loss_before"]), *_points(records, "validation_loss")]
    lines = [Line("training", _points(records, "loss")), Line("validation", validation, mark="dot")]
    unit, name = _unit(summary["whole_batch_memory"])
    memory = sorted((float(rows), size / unit) for rows, size in summary["memory_by_rows"].items())
    used = [point for point in memory if point[0] == summary["micro_batch_size"]]
    budget = ("budget", settings["memory"] / unit) if settings["micro_batch_size"] is None else None
    drawn = {
        "Loss": Chart(lines, "step", "{:.2f}".format),
        "Gradient norm, before clipping": Chart(
            [Line("gradient norm", _points(records, "grad_norm"))], "step", "{:.3g}".format, from_zero=True
        ),
        "Predicted memory by micro-batch size": Chart(
            [Line("predicted peak", memory, mark="dot"), *([Line("in use", used, mark="ring")] if used else [])],
            "rows at a time",
            lambda size: f"{size:,.4g} {name}",
            from_zero=True,
            level=budget,
        ),
        "Throughput": Chart(
            [Line("tokens per second", _points(records, "tokens_per_second"))], "step", "{:,.0f}".format, from_zero=True
        ),
    }
    return [
        f'<section class="card"><h2>{escape(title)}</h2>{chart.svg(title)}{chart.legend()}</section>'
        for title, chart in drawn.items()
        if any(line.points for line in chart.lines)
    ]


def _comparison(comparison: Facts) -> str:
    rows: list[Row] = [(way["name"], *figures(way)) for way in comparison["ways"]]
    return _section(
        f"The first {comparison['steps']} steps, three ways",
        f'<p class="soft">{escape(comparison["note"])}</p>'
        + _table(rows, "numbers", ("", "time", "peak memory", "against the unsplit batch")),
    )


def _sample(sample: dict[str, str]) -> str:
    return _section(
        "What the model writes",
        f'<pre><span class="prompt">{escape(sample["prompt"])}</span>{escape(sample["continued"])}</pre>',
    )


def _configuration(summary: Facts) -> str:
    settings: dict[str, Any] = summary["settings"]
    rows = [
        (option(name), shown(name, value))
        for name, value in settings.items()
        if value not in (None, []) or name == "micro_batch_size"
    ]
    return _section("Configuration", _table(rows, "settings"))


def _unit(size: int) -> tuple[int, str]:
    """The unit that suits a size, so that round numbers are round in it."""
    return next(
        ((unit, name) for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")) if size >= 2 * unit), (1024, "KiB")
    )


def _points(records: Sequence[Record], name: str) -> list[Point]:
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def _tile(name: str, value: str, note: str) -> str:
    return (
        f'<div class="tile"><div class="name">{escape(name)}</div><div class="value">{value}</div>'
        f'<div class="note">{escape(note)}</div></div>'
    )


def _section(title: str, content: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{content}</section>'


def _table(rows: Sequence[Row], kind: str, head: Row | None = None) -> str:
    top = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    body = "".join(
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    return f'<div class="scroll"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'
