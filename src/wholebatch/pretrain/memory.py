"""Bytes: what people write, what they read, and what the process holds."""

import re
from pathlib import Path
from typing import Any

from .._errors import OptionError

UNITS = {"": 1, "B": 1, **{f"{letter}iB": 1024 ** (i + 1) for i, letter in enumerate("KMGT")}}
UNITS |= {f"{letter}B": 1000 ** (i + 1) for i, letter in enumerate("kMGT")} | {"KB": 1000}


def bytes_of(name: str, given: Any) -> int:
    """How many bytes were asked for.

    Args:
        name: what the option is called.
        given: a number of them, or one with a unit.

    >>> bytes_of("memory", "1.5GiB")
    1610612736
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(given))
    unit = found and next((size for unit, size in UNITS.items() if unit.lower() == found[2].lower()), None)
    if not found or unit is None or not float(found[1]):
        raise OptionError(f"{name} must be a size such as 512MiB or 2GiB, got {given!r}")
    return int(float(found[1]) * unit)


def readable(size: float) -> str:
    """Bytes as people write them.

    >>> readable(134217728)
    '128 MiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


class Resident:
    """How much the process grows from here on, at its largest; None where the system does not tell."""

    def __init__(self) -> None:
        self._start = _read("VmRSS")
        self._reset()

    def peak(self) -> int | None:
        """The largest growth since the start."""
        peak = _read("VmHWM")
        return None if peak is None or self._start is None else max(0, peak - self._start)

    @staticmethod
    def _reset() -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pass


def _read(field: str) -> int | None:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else None
