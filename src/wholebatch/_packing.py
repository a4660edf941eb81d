"""Which rows of unequal length share a piece.

    cost = Σ_pieces (rows × longest) + pieces × extra,   rows × longest <= budget

A sum has no order, so rows may share a piece with those that are about as long as they are, and padding beyond the
longest of them need not be computed.
"""

from collections.abc import Sequence
from itertools import accumulate

from ._errors import BatchError

_EXTRA = 1 / 16
"""What a piece costs besides its tokens, as a part of the budget: it reads all weights again, however small it is."""


def packed(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Rows of each piece at the least cost, the longest piece first, so that one that does not fit fails at once.

    >>> packed([3, 8, 2, 7], 16)
    [[1, 3], [0, 2]]
    """
    for row, length in enumerate(lengths):
        if length > budget:
            raise BatchError(
                f"row {row} has length {length}, and a piece may hold micro_batch_tokens={budget}: "
                "no row is cut, so give at least the longest length, or shorten the row"
            )
    order = _longest_first(lengths)
    starts = _cheapest_starts([max(1, lengths[row]) for row in order], budget)
    return [sorted(order[start:stop]) for start, stop in zip(starts, [*starts[1:], len(order)], strict=True)]


def sorted_into(lengths: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Rows of each piece where the sizes of the pieces are given.

    >>> sorted_into([3, 8, 2, 7], [2, 1, 1])
    [[1, 3], [0], [2]]
    """
    order = _longest_first(lengths)
    return [sorted(order[stop - size : stop]) for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


def _cheapest_starts(lengths: Sequence[int], budget: int) -> list[int]:
    """Where the pieces start, in rows that are sorted by length.

    best[i] = min_j best[j] + (i - j) · length[j] + extra. The best j never moves back as i grows, since rows only get
    shorter; neither does the first one that the budget admits.
    """
    best, start_of_last = [0.0], [0]
    first = 0
    for stop in range(1, len(lengths) + 1):
        while (stop - first) * lengths[first] > budget:
            first += 1
        costs = [best[start] + (stop - start) * lengths[start] for start in range(first, stop)]
        least = min(costs)
        first += costs.index(least)
        best.append(least + _EXTRA * budget)
        start_of_last.append(first)
    starts = [start_of_last[-1]]
    while starts[-1]:
        starts.append(start_of_last[starts[-1]])
    return starts[::-1]
