"""Peak memory: the largest resident size over the resident size before the first step."""

import re
import resource
import sys
from pathlib import Path
from typing import Any

from ._turns import BATCHES

STEPS = 2
"""In the second there are the optimizer's states."""


def grown(bench: Any, name: str) -> int:
    """How many bytes the resident size grew over the first steps, at most.

    Args:
        bench: makes the contender and batches.
        name: of the contender.
    """
    batches, contender = bench.batches(BATCHES), bench.contender(name)
    before = _resident()
    for batch in batches[:STEPS]:
        contender.step(batch)
    return _highest() - before


def _resident() -> int:
    """Now; from here on the peak counts, where Linux lets it be reset."""
    if not _STATUS.exists():
        return _highest()
    Path("/proc/self/clear_refs").write_text("5")
    return _of_status("VmRSS")


def _highest() -> int:
    if not _STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return _of_status("VmHWM")


_STATUS = Path("/proc/self/status")


def _of_status(what: str) -> int:
    found = re.search(what + r":\s+(\d+) kB", _STATUS.read_text())
    assert found is not None
    return int(found[1]) * 1024
