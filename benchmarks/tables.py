"""Write the tables of README and docs/performance.md from the committed results.

    python benchmarks/tables.py

The text between `<!-- benchmarks: NAME -->` and `<!-- end -->` is replaced.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wholebatch.bench import CASES
from wholebatch.bench._case import MULTI_STEPS, MULTI_STEPS_DONATED, OURS, UNSPLIT
from wholebatch.bench._report import limit, table
from wholebatch.bench._targets import verdicts

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "performance.md"]
PLACE = re.compile(r"(<!-- benchmarks: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

TORCH = [
    ("a/1", "GPT, vocabulary 50,257: micro-batch 1"),
    ("a/4", "the same, micro-batch 4"),
    ("a/16", "the same, one piece"),
    ("b/1", "GPT, vocabulary 1,000: micro-batch 1"),
    ("c/gpt", "a tiny GPT, 64 pieces: what a loop costs"),
    ("d/8", "convolutions with GroupNorm"),
    ("e/2", "rows of 16 to 512 tokens"),
]
JAX = [("f/1", "GPT, vocabulary 50,257: micro-batch 1"), ("f/4", "the same, micro-batch 4")]


def results() -> dict[str, dict[str, Any]]:
    """What is committed, by case and setting; of each the newest."""
    found: dict[str, dict[str, Any]] = {name: {} for name in CASES}
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        held = json.loads(file.read_text())
        if held.keys() <= CASES.keys():  # others beside them have a form of their own
            for name, settings in held.items():
                found[name] |= settings
    return {name: settings for name, settings in found.items() if settings}


def _record(found: Mapping[str, Any], place: str) -> Any:
    case, _, setting = place.partition("/")
    return found.get(case, {}).get(setting)


def torch_table(found: Mapping[str, Any]) -> str:
    """Step times over the plain loop's, and the peak of memory over its."""
    return _table(found, TORCH, ["Accelerate", "Fabric", UNSPLIT, OURS], "peak_bytes", "peak memory")


def jax_table(found: Mapping[str, Any]) -> str:
    """Step times over those of the scan by hand, and temporary memory over its."""
    others = [UNSPLIT, "unrolled loop", "optax.microbatch", MULTI_STEPS, MULTI_STEPS_DONATED, OURS]
    return _table(found, JAX, others, "temporary_bytes", "temporary memory")


def _table(found: Mapping[str, Any], places: list[tuple[str, str]], names: list[str], memory: str, called: str) -> str:
    lines = [
        f"| | {' | '.join(f'**{n}**' if n == OURS else n for n in names)} | {called} |",
        "|---" * (len(names) + 2) + "|",
    ]
    for place, title in places:
        if _record(found, place) is None:
            continue
        contenders = _record(found, place)["contenders"]
        times = [f"{contenders[name]['ratio']:.2f}" if name in contenders else "" for name in names]
        baseline = next(iter(contenders.values()))
        ours = contenders[OURS]
        share = f"{ours[memory] / baseline[memory]:.2f}" if memory in ours else ""
        lines.append(f"| {title} | {' | '.join(times[:-1])} | **{times[-1]}** | {share} |")
    return "\n".join(lines) + "\n"


def targets(found: Mapping[str, Any]) -> str:
    """What the cases must show, and what they did."""
    lines = ["| case | measured | at most | |", "|---|---|---|---|"]
    for name, settings in found.items():
        for verdict in verdicts(name, settings):
            unit = " µs per piece" if verdict.target.measure == "overhead" else ""
            lines.append(
                f"| {name}/{verdict.setting}: {verdict.target.measure} over {_named(verdict.target.over)} "
                f"| {verdict.measured:.2f}{unit} | {verdict.target.at_most:.2f} | {'' if verdict.holds else 'missed'} |"
            )
    return "\n".join(lines) + "\n"


def _named(over: str) -> str:
    return f"that of {over} pieces" if over.isdigit() else over


def all_of_it(found: Mapping[str, Any]) -> str:
    """What the command printed."""
    return f"```\n{table(found)}\n```\n"


def machine(found: Mapping[str, Any]) -> str:
    """Where and with what it was measured."""
    record = _record(found, "f/4")
    packages = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if name != "wholebatch")
    return (
        f"{record['machine']['processor']}, {record['machine']['threads']} threads, {record['date']}; {packages}. "
        f"In case f/4, {limit(record)}.\n"
    )


TABLES = {"torch": torch_table, "jax": jax_table, "targets": targets, "all": all_of_it, "machine": machine}


def with_tables(text: str, found: Mapping[str, Any]) -> str:
    """A page with its tables as they should be."""
    return PLACE.sub(lambda place: place[1] + TABLES[place[2]](found) + place[3], text)


if __name__ == "__main__":
    committed = results()
    for page in PAGES:
        page.write_text(with_tables(page.read_text(), committed))
