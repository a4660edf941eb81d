"""Reduce: the local sums of every process become the global batch's, crossing the wire once.

One process holds them already.
"""

from ._sums import GradientSums


def reduce(sums: GradientSums) -> None:
    """Add the other processes' sums to this one's."""
