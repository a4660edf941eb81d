"""Measurements against the loop that one would write, and against peers.

    ratio = best time of a contender / best time of the baseline

Machines are shared and noisy, so contenders take turns in one process, on fresh random inputs, and ratios alone are
compared: of the best times, as what disturbs a machine only ever adds. Before anything is timed, all must come to the
same weights in float64; who computes something else is not timed. Peak memory is that of a process per contender. The
machine's own limits are measured in the same run.
"""

from ._cases import CASES
from ._run import measure, missing, select

__all__ = ["CASES", "measure", "missing", "select"]
