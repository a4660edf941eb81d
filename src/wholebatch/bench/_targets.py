"""What the cases must show, and whether they do."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ._case import OURS, Target
from ._cases import CASES

Settings = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured."""

    case: str
    setting: str
    target: Target
    measured: float

    @property
    def holds(self) -> bool:
        return self.measured <= self.target.at_most

    def __str__(self) -> str:
        unit = " µs per piece" if self.target.measure == "overhead" else ""
        verdict = "holds" if self.holds else "MISSED"
        return (
            f"{self.case}/{self.setting}: {self.target.measure} over {self.target.over}: "
            f"{self.measured:.2f}{unit}, at most {self.target.at_most:.2f}: {verdict}"
        )


def verdicts(case: str, settings: Settings) -> Iterator[Verdict]:
    """Each target of a case, wherever what it needs was measured.

    Args:
        case: its name.
        settings: what was measured, by setting.
    """
    for target in CASES[case].targets:
        for name in target.settings:
            measured = _measured(target, name, settings)
            if measured is not None:
                yield Verdict(case, name, target, measured)


def _measured(target: Target, name: str, settings: Settings) -> float | None:
    record = settings.get(name)
    if record is None or OURS not in record["contenders"]:
        return None
    ours = record["contenders"][OURS]
    if target.over in settings:  # another setting of ours
        other_record = settings[target.over]
        other = other_record["contenders"][OURS]
        if target.measure == "peak memory":
            return float(ours["peak_bytes"] / other["peak_bytes"])
        return float(ours["seconds"] / record["rows"] / (other["seconds"] / other_record["rows"]))
    other = record["contenders"].get(target.over)
    if other is None:
        return None
    if target.measure == "time":
        return float(ours["ratio"] / other["ratio"])
    if target.measure == "overhead":
        pieces = record["rows"] // record["micro_batch_size"]
        return float((ours["ratio"] - other["ratio"]) * _baseline(record) / pieces * 1e6)
    key = "peak_bytes" if target.measure == "peak memory" else "temporary_bytes"
    return float(ours[key] / other[key])


def _baseline(record: Mapping[str, Any]) -> float:
    return float(next(iter(record["contenders"].values()))["seconds"])
