"""`wholebatch bench`: measure against the plain loop and against peers."""

import json
from pathlib import Path
from typing import Any

import click

from .._errors import OptionError
from ..bench import CASES, measure, missing, select
from ..bench._case import OURS
from ..bench._plot import plot, require_plotting
from ..bench._report import table
from . import DONE, NO, Command, say

_CASES = "; ".join(f"{name} {case.title}" for name, case in CASES.items())


@click.command(
    "bench",
    cls=Command,
    example="wholebatch bench --case a/1 --case c --out results.json --plot results.png",
    help=f"""Measure against the loop that one would write, the unsplit batch and the peers that are installed. All must
    first come to the same weights in float64. Ratios are those of best times in rounds in which contenders take turns.

    Cases: {_CASES}.""",
)
@click.option("--case", "cases", multiple=True, help="A case (a), or one of its settings (a/4). Default: all.")
@click.option("--quick", is_flag=True, help="On small problems, to see whether all works; the figures say nothing.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write results here as JSON. Other settings that the file holds stay.",
)
@click.option("--plot", "picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw them here (.png, .svg).")
def command(cases: tuple[str, ...], quick: bool, out: Path | None, picture: Path | None, as_json: bool) -> int:
    chosen = select(cases)
    if picture:
        require_plotting()
    kept = _read(out) if out and out.exists() else {}
    results: dict[str, dict[str, Any]] = {}
    for name, setting in chosen:
        case = CASES[name]
        absent = missing(case)
        if OURS in absent:
            click.echo(f"({name}) {case.title}: left out, {absent[OURS]}", err=True)
            continue
        for doing, record in measure(case, setting, quick=quick):
            click.echo(f"{name}/{setting.name}: {doing}", err=True)
            results.setdefault(name, {})[setting.name] = record
            if out and record["contenders"]:
                out.write_text(json.dumps(_merged(kept, results), indent=1) + "\n")
    if picture:
        plot(_merged(kept, results), picture)
    say(table(results), as_json, results)
    return (
        NO if any(OURS in record["left_out"] for settings in results.values() for record in settings.values()) else DONE
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise OptionError(f"--out {file} holds something else than results: {error}") from error
    if not isinstance(found, dict) or not set(found) <= set(CASES):
        raise OptionError(f"--out {file} holds something else than results: name another file")
    return found


def _merged(kept: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """By case and setting, in the order of the cases."""
    both = {name: {**kept.get(name, {}), **results.get(name, {})} for name in CASES}
    return {
        name: {s.name: both[name][s.name] for s in case.settings if s.name in both[name]}
        for name, case in CASES.items()
        if both[name]
    }
