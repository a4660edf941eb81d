"""Least squares with few unknown numbers, where each equation is one of gradients.

Arrays may be those of any framework.
"""

import math
from collections.abc import Sequence
from typing import Any


def coefficients(target: Sequence[Any], columns: Sequence[Sequence[Any]]) -> list[float]:
    """The numbers k under which Σ k_i column_i comes nearest to the target.

    Args:
        target: arrays.
        columns: for each number as many arrays of the same sizes.
    """
    gram = [[_inner(one, other) for other in columns] for one in columns]
    steadied(gram, 1e-15)
    return solve(gram, [_inner(one, target) for one in columns])


def steadied(matrix: list[list[float]], share: float) -> None:
    """Add that share of the trace to the diagonal, so that a singular matrix can be solved with too."""
    trace = sum(row[i] for i, row in enumerate(matrix)) or 1.0
    for i, row in enumerate(matrix):
        row[i] += share * trace


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss's elimination, of a small matrix that is positive definite."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i, pivot in enumerate(rows):
        for row in rows[i + 1 :]:
            factor = row[i] / pivot[i]
            row[:] = [entry - factor * above for entry, above in zip(row, pivot, strict=True)]
    solved = [0.0] * len(rows)
    for i in reversed(range(len(rows))):
        known = sum(rows[i][j] * solved[j] for j in range(i + 1, len(rows)))
        solved[i] = (rows[i][-1] - known) / rows[i][i]
    return solved


def largest(entries: Any) -> float:
    """The largest magnitude, infinite where an entry is not a number."""
    found = float(abs(entries).max())
    return math.inf if math.isnan(found) else found


def _inner(one: Sequence[Any], other: Sequence[Any]) -> float:
    return sum(float((a * b).sum()) for a, b in zip(one, other, strict=True))
