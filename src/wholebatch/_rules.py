"""From gradients of parts of a batch to the rule that a loss follows.

With G(S) the gradient of what the loss returned for the rows S, and S, S' without a row in common:

    adds        G(S ∪ S') = G(S) + G(S')                          a sum
    offset      G(S ∪ S') = G(S) + G(S') - p                      a sum, and p that does not grow with the rows
    weighted    G(S ∪ S') = (w G(S) + w' G(S')) / (w + w')        a mean over something that S holds w of
    two means   G(S) = a mean over something + a mean over something else       (`_mixture.py`)
    separate    G(A, B) - G(A', B) - G(A, B') + G(A', B') = 0     of equally many rows: none sees another

A rule holds if what it leaves unexplained is small beside what the split gets wrong. Arrays may be those of any
framework.
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from ._causes import Cause
from ._fitting import largest, solve, steadied
from ._mixture import explained_by_two_means
from ._terms import Per

UNEXPLAINED = 0.005
"""What part of the split's error a rule may leave over."""

FEW, MANY = 4, 32
"""How many rows mostly show which rule holds, and how many are looked at one by one at most."""

ENTRIES = 2**16
"""How many entries of a parameter's gradient are looked at: rules hold for each entry."""


class Observation(NamedTuple):
    """What a term came to for some rows.

    Args:
        total: the gradient of its total, or of a scalar itself, as one flat array.
        counted: what a `Mean` counted, 1 for others.
    """

    total: Any
    counted: float = 1.0


Observe = Callable[[Sequence[int]], Observation | None]
"""Looks at the loss of these rows (they may repeat), in this order; None where the loss fails."""

Part = frozenset[int]


def rule_broken(per: Per, rows: int, observe: Observe, eps: float) -> Cause | None:
    """Why a term cannot be split as it is read; None if it can.

    Args:
        per: what it is divided by.
        rows: how many there are.
        observe: looks at the term.
        eps: the precision of what is observed.
    """
    alone = {row: observe([row]) for row in range(min(rows, MANY))}
    # parts in which nothing counts would fit any rule, so rows that count come first
    order = sorted(range(rows), key=lambda row: row in alone and not _counts(alone[row]))
    for several in (order[:FEW], order, order[::-1]):
        seen = _Seen(several, observe, eps)
        if seen.misread(per):
            break
    else:
        return None
    if seen.failed:
        return "coupled-rows"
    if per is Per.ROWS:
        if seen.adds() or seen.offset():
            return "sum-as-mean"
        if seen.weighted() or explained_by_two_means(order, lambda rows: _thinned(observe(rows)), eps):
            return "mean-of-means"
        return "sum-as-mean" if rows_are_separate(rows, observe, seen.floor) else "coupled-rows"
    if per is Per.OWN_COUNT:
        if seen.adds():
            return "sum-as-mean"
        if seen.weighted():
            return "mean-of-means" if seen.counts_alike() else "mean-as-total"
        if seen.weighted(normalised=True):
            return "mean-of-means"
    if seen.weighted() or seen.offset() or rows_are_separate(rows, observe, seen.floor):
        return "mean-as-total"
    return "coupled-rows"


def stride(entries: int) -> int:
    """Every how many entries of a gradient one is looked at."""
    return max(1, -(-entries // ENTRIES))


def order_matters(rows: int, observe: Observe) -> float:
    """How much the gradient changes with the order of the rows, over its largest entry; infinite where it fails."""
    as_given, shuffled = observe(range(rows)), observe([*reversed(range(1, rows)), 0])
    if as_given is None or shuffled is None:
        return math.inf
    scale = largest(as_given.total)
    return largest(shuffled.total - as_given.total) / scale if scale else math.inf


def rows_matter(rows: int, observe: Observe) -> bool:
    """Whether rows differ in what they come to; a loss that looks at none of them is exact for no reason."""
    one, other = observe([0]), observe([rows - 1])
    return one is not None and other is not None and largest(one.total - other.total) > 1e-6 * largest(one.total)


def rows_are_separate(rows: int, observe: Observe, floor: float = 0.0) -> bool:
    """Whether the contents of one half of the rows act without those of the other, for several ways of halving."""
    given = list(range(rows))
    halvings = [given, given[::2] + given[1::2], given[1:] + given[:1]]
    return rows < 2 or all(_halves_are_separate(order, observe, floor) for order in halvings)


def _halves_are_separate(rows: list[int], observe: Observe, floor: float) -> bool:
    first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    first_other, second_other = second[: len(first)], (first * 2)[: len(second)]
    corners = [observe(one + other) for one in (first, first_other) for other in (second, second_other)]
    if any(corner is None for corner in corners):
        return False
    a, b, c, d = (corner.total for corner in corners if corner is not None)
    effect = max(largest(a - b), largest(a - c))
    return math.isfinite(effect) and largest(a - b - c + d) <= 1e-6 * effect + floor


class _Seen:
    """The gradients of three parts of unequal size and of everything they make up."""

    def __init__(self, rows: list[int], observe: Observe, eps: float) -> None:
        second = 1 + max(1, (len(rows) - 1) // 3)
        self._parts: list[Part] = [frozenset(part) for part in (rows[:1], rows[1:second], rows[second:]) if part]
        self._totals: dict[Part, Any] = {}
        self._counts: dict[Part, float] = {}
        self.failed = False
        for number in range(1, len(self._parts) + 1):
            for several in combinations(self._parts, number):
                part = frozenset().union(*several)
                observation = observe(sorted(part))
                if observation is None:
                    self.failed = True
                elif math.isfinite(largest(observation.total)):
                    self._totals[part], self._counts[part] = observation
        self._unions = [
            (one, other, one | other)
            for one in self._totals
            for other in self._totals
            if min(one) < min(other) and not one & other and one | other in self._totals
        ]
        self._scale = max(map(largest, self._totals.values()), default=0.0)
        self.floor = max(1e-9, 256 * eps) * self._scale
        self._wrong = self._scale

    def misread(self, per: Per) -> bool:
        """Whether the library's own rule for such a term fails; remembers by how much."""
        if len(self._parts) < 2:
            return False
        if not self._unions or len(self._totals) < 2 ** len(self._parts) - 1:
            return True

        def as_read(one: Part, other: Part) -> Any:
            if per is Per.ROWS:
                return (len(one) * self._totals[one] + len(other) * self._totals[other]) / (len(one) + len(other))
            total = self._totals[one] + self._totals[other]
            counted = self._counts[one] + self._counts[other]
            return total * (self._counts[one | other] / counted) if per is Per.OWN_COUNT and counted else total

        self._wrong = self._left_over(as_read)
        return self._wrong > self.floor

    def adds(self) -> bool:
        return self._holds(lambda one, other: self._totals[one] + self._totals[other])

    def offset(self) -> bool:
        if len(self._unions) < 2:
            return False
        one, other, union = self._unions[-1]
        constant = self._totals[one] + self._totals[other] - self._totals[union]
        return self._holds(lambda one, other: self._totals[one] + self._totals[other] - constant)

    def counts_alike(self) -> bool:
        return len(set(self._counts.values())) == 1

    def weighted(self, *, normalised: bool = False) -> bool:
        """Whether there is one weight for each part that explains all unions; what is not finite weighs nothing."""
        values = {
            part: total / self._counts[part] if normalised and self._counts[part] else total
            for part, total in self._totals.items()
        }
        parts = [part for part in self._parts if part in values]
        weights = dict(zip(parts, _weights(parts, values), strict=True))
        left_over = 0.0
        for union, value in values.items():
            inside = [part for part in parts if part <= union]
            weight = sum(weights[part] for part in inside)
            if len(inside) == 1 and weight > 0:
                continue
            predicted = sum(weights[part] * values[part] for part in inside) / weight if weight else 0 * value
            left_over = max(left_over, largest(value - predicted))
        allowed = UNEXPLAINED * self._wrong + self.floor
        return bool(parts) and left_over <= (allowed / (max(self._counts.values()) or 1) if normalised else allowed)

    def _holds(self, rule: Callable[[Part, Part], Any]) -> bool:
        whole = len(self._totals) == 2 ** len(self._parts) - 1  # what fails or is not a number is no sum
        return whole and bool(self._unions) and self._left_over(rule) <= UNEXPLAINED * self._wrong + self.floor

    def _left_over(self, rule: Callable[[Part, Part], Any]) -> float:
        return max(largest(self._totals[union] - rule(one, other)) for one, other, union in self._unions)


def _thinned(observation: Observation | None) -> Any:
    """Some entries of the total, in memory of their own: many observations are kept."""
    return None if observation is None else observation.total[:: stride(len(observation.total))] + 0.0


def _counts(observation: Observation | None) -> bool:
    return observation is not None and 0 < largest(observation.total) < math.inf


def _weights(parts: list[Part], values: dict[Part, Any]) -> list[float]:
    """The weights, the largest of them 1, under which the parts come nearest to explaining their unions.

    Σ_P w_P (G(P) - G(S)) = 0 for every union S: with the Gram matrix M of these differences, M w ∝ 1.
    """
    matrix = [[0.0] * len(parts) for _ in parts]
    for union, value in values.items():
        apart = {i: values[part] - value for i, part in enumerate(parts) if part < union}
        for i in apart:
            for j in apart:
                matrix[i][j] += float((apart[i] * apart[j]).sum())
    steadied(matrix, 1e-12)
    solved = [max(0.0, weight) for weight in solve(matrix, [1.0] * len(parts))]
    most = max(solved, default=0.0)
    return [weight / most if weight > 1e-6 * most else 0.0 for weight in solved]
