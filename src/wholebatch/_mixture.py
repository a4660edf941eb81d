"""Two means in one number, over things that rows hold unequally: w of the one and v of the other.

    G(S) = Σ_S w g / Σ_S w  +  Σ_S v h / Σ_S v

Rows may be taken several times. With r of row j to one of row i, ω = w_j / w_i and ν = v_j / v_i, row j adds

    D(r) = r ω / (1 + r ω) (g_j - g_i)  +  r ν / (1 + r ν) (h_j - h_i)
    D(r) (1 + (ω + ν) r + ω ν r²) = r P + r² ω ν D(∞),  with one P for every r

which is linear in ω + ν and ω ν. With these, the first equation is linear in g and h; three rows, taken in all ways,
give more equations than there are unknowns, which neither a product of means fulfils nor rows that see each other.
"""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from ._fitting import coefficients, largest, solve, steadied

Look = Callable[[Sequence[int]], Any]
"""The gradient for these rows, or None."""

TAKEN = 5
"""How many rows each look takes: all looks at one number of rows are one program where programs are compiled."""

UNEXPLAINED = 1e-6
"""What part of the distance from a mean over rows two means may leave over: smooth functions of a mean come close."""

SOME, TRIES = 7, 3
"""How many rows are tried, and how many pairs of them may fit no two means."""

Ratios = tuple[float, float]
"""By how much more of each a row holds than another one."""


def explained_by_two_means(rows: Sequence[int], look: Look, eps: float) -> bool:
    """Whether the loss of rows is a mean over one thing and a mean over another.

    Args:
        rows: the ones to take.
        look: finds the gradient of rows, which may repeat.
        eps: the precision of that.
    """
    return _Rows(rows[:SOME], look, max(1e-9, 256 * eps)).are_explained()


class _Rows:
    def __init__(self, rows: Sequence[int], look: Look, noise: float) -> None:
        self._look = look
        self._known: dict[tuple[int, ...], Any] = {}
        alone = {row: self._taken([row] * TAKEN) for row in rows}
        self._alone = {row: found for row, found in alone.items() if found is not None}
        self._noise = noise * max(map(largest, self._alone.values()), default=0.0)

    def are_explained(self) -> bool:
        """Of some three rows, of which the second and the third hold both in other ratios than the first."""
        tries = TRIES
        for first in self._alone:
            others: list[tuple[int, Ratios]] = []
            for other in self._alone:
                if other != first and not self._is_one_mean(first, other):
                    ratios = self._ratios(first, other)
                    tries -= ratios is None
                    others += [] if ratios is None else [(other, ratios)]
                if len(others) == 2:
                    (second, (a, b)), (third, (c, d)) = others
                    three = (first, second, third)
                    return self._explains(three, (1, a, c), (1, b, d)) or self._explains(three, (1, a, d), (1, b, c))
                if not tries:
                    return False
        return False

    def _is_one_mean(self, first: int, other: int) -> bool:
        """Whether one weight explains a pair, also where both rows hold of both alike."""
        between = self._between(first, other)
        if between is None:
            return False
        target = [d for _, d, _ in between]
        column = [r * (d - end) for r, d, end in between]
        (weight,) = coefficients([-one for one in target], [column])
        left = max(largest(one + weight * per) for one, per in zip(target, column, strict=True))
        return left <= UNEXPLAINED * max(map(largest, target)) + self._noise

    def _ratios(self, first: int, other: int) -> Ratios | None:
        """The ω and ν of a pair of rows, if there are any."""
        between = self._between(first, other)
        if between is None:
            return None
        target = _centred([-d / r for r, d, _ in between])
        columns = [_centred([d for _, d, _ in between]), _centred([r * (d - end) for r, d, end in between])]
        both, square = coefficients(target, columns)
        apart = both * both - 4 * square
        if not (both > 0 and square > 0 and apart > 0):
            return None
        return (both + math.sqrt(apart)) / 2, (both - math.sqrt(apart)) / 2

    def _explains(self, three: tuple[int, ...], w: Sequence[float], v: Sequence[float]) -> bool:
        """Whether G and H, one for each row, explain what the three rows come to in every number."""
        numbers = [n for n in product(range(TAKEN + 1), repeat=3) if sum(n) == TAKEN]
        seen = [self._taken([row for row, many in zip(three, n, strict=True) for _ in range(many)]) for n in numbers]
        if any(one is None for one in seen):
            return False
        of_w, of_v, by_rows = ([_shares(n, weight) for n in numbers] for weight in (w, v, (1, 1, 1)))
        alone = [self._alone[row] for row in three]
        # h is what a row alone comes to without g, and of g only differences matter
        target = [one - _sum(shares, alone) for one, shares in zip(seen, of_v, strict=True)]
        matrix = [[a - b for a, b in zip(x[1:], y[1:], strict=True)] for x, y in zip(of_w, of_v, strict=True)]
        gram = [[sum(row[i] * row[j] for row in matrix) for j in range(2)] for i in range(2)]
        steadied(gram, 1e-15)
        inverse = [solve(gram, [float(i == j) for i in range(2)]) for j in range(2)]
        right = [_sum([row[i] for row in matrix], target) for i in range(2)]
        g = [_sum(row, right) for row in inverse]
        left = max(largest(one - _sum(row, g)) for one, row in zip(target, matrix, strict=True))
        wrong = max(largest(one - _sum(shares, alone)) for one, shares in zip(seen, by_rows, strict=True))
        return left <= UNEXPLAINED * wrong + self._noise < wrong

    def _between(self, first: int, other: int) -> list[tuple[float, Any, Any]] | None:
        """By r: what the other row adds, and what it adds at most."""
        numbers = range(1, TAKEN)
        seen = [self._taken([first] * (TAKEN - many) + [other] * many) for many in numbers]
        if any(one is None for one in seen):
            return None
        start, end = self._alone[first], self._alone[other] - self._alone[first]
        return [(many / (TAKEN - many), one - start, end) for many, one in zip(numbers, seen, strict=True)]

    def _taken(self, rows: list[int]) -> Any:
        key = tuple(sorted(rows))
        if key not in self._known:
            found = self._look(key)
            self._known[key] = found if found is not None and largest(found) < math.inf else None
        return self._known[key]


def _shares(numbers: Sequence[int], weights: Sequence[float]) -> list[float]:
    held = [number * weight for number, weight in zip(numbers, weights, strict=True)]
    return [one / sum(held) for one in held]


def _sum(numbers: Sequence[float], arrays: Sequence[Any]) -> Any:
    return sum(number * array for number, array in zip(numbers, arrays, strict=True))


def _centred(arrays: list[Any]) -> list[Any]:
    middle = sum(arrays) / len(arrays)
    return [array - middle for array in arrays]
