"""What was measured, as a table for a terminal."""

from collections.abc import Mapping
from typing import Any

from ._cases import CASES
from ._targets import verdicts

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Records by case and setting."""


def table(results: Results) -> str:
    """All that was measured, case by case.

    Args:
        results: the records.
    """
    lines: list[str] = []
    for name, settings in results.items():
        lines += ["", f"({name}) {CASES[name].title}"]
        for setting, record in settings.items():
            lines += ["", *_of_setting(setting, record)]
        if not any(record["quick"] for record in settings.values()):
            lines += ["", *(f"  {verdict}" for verdict in verdicts(name, settings))]
    if any(record["quick"] for settings in results.values() for record in settings.values()):
        lines += ["", "Quick: on small problems, to see whether all works. The figures say nothing."]
    return "\n".join(lines).strip()


def _of_setting(setting: str, record: Mapping[str, Any]) -> list[str]:
    title = f"  {setting}: {record['rows']} rows" if "rows" in record else f"  {setting}"
    lines = [f"{title:<24}{'time':>12}{'ratio':>8}{'quartiles':>14}{'memory':>12}{'ratio':>8}{'compile':>10}"]
    contenders = record["contenders"]
    baseline = next(iter(contenders.values()), None)
    for name, found in contenders.items():
        low, high = found["ratio_quartiles"]
        line = f"    {name:<20}{seconds(found['seconds']):>12}{found['ratio']:>8.2f}{f'{low:.2f}-{high:.2f}':>14}"
        if memory(found) is not None:
            line += f"{memory(found) / 2**20:>8.1f} MiB{memory(found) / max(memory(baseline), 1):>8.2f}"
        if "compile_seconds" in found:
            line += f"{found['compile_seconds']:>8.1f} s"
        lines.append(line)
    lines += [f"    {name:<20}left out: {reason}" for name, reason in record["left_out"].items()]
    if "limits" in record:
        lines.append(f"    {limit(record)}")
    return lines


def memory(found: Any) -> Any:
    """Peak or temporary bytes, whichever was measured."""
    return found.get("peak_bytes", found.get("temporary_bytes"))


def limit(record: Mapping[str, Any]) -> str:
    """The machine's own limits, and what they leave for a step.

    Args:
        record: of a setting.
    """
    rates, work = record["limits"], record["work"]
    least = work["operations"] / rates["operations"] + work["bytes"] / rates["bytes"]
    return (
        f"this machine: {rates['operations'] / 1e9:.0f} Gop/s in a matrix product, "
        f"{rates['bytes'] / 1e9:.1f} GB/s in a copy; at these a step takes at least {seconds(least)}"
    )


def seconds(time: float) -> str:
    """A time in a unit that suits it.

    Args:
        time: in seconds.
    """
    if time >= 1:
        return f"{time:.2f} s"
    return f"{time * 1e3:.1f} ms" if time >= 1e-3 else f"{time * 1e6:.0f} µs"
