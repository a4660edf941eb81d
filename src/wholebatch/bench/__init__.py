"""Measurements against the loop that one would write, and against peers.

    ratio = median over rounds of (seconds of a contender / seconds of the baseline in the same round)

Machines are shared and noisy, so contenders take turns in one process, on fresh random inputs, and only ratios are
compared. Before anything is timed, all must come to the same weights in float64; who computes something else is not
timed. Peak memory is that of a process per contender. The machine's own limits are measured in the same run.
"""

from ._cases import CASES
from ._run import measure, missing, select

__all__ = ["CASES", "measure", "missing", "select"]
