"""Which rows of a batch to look at, and how to cut them: few, but such that cutting shows what it does."""

from collections.abc import Iterable


def cuts_to_try(rows: int, pieces_of_size: int | None) -> list[int]:
    """Numbers of pieces that show what cutting does: two, three, one row each, and the user's own."""
    return sorted({min(pieces, rows) for pieces in (2, 3, rows, pieces_of_size or rows)})


def rows_to_use(rows: int, micro_batch_size: int | None) -> int:
    """A few: a prime number of them, so that pieces are ragged, and enough for the user's own size."""
    return min(rows, max(7, 2 * (micro_batch_size or 0) + 1))


def rows_to_take(rows: int, number: int, unusual: Iterable[int] = ()) -> list[int]:
    """That many rows, spread evenly, since neighbours are often alike; unusual ones in place of their neighbours.

    >>> rows_to_take(50, 7), rows_to_take(50, 7, unusual=[9])
    ([0, 8, 16, 24, 33, 41, 49], [0, 9, 16, 24, 33, 41, 49])
    """
    spread = [round(i * (rows - 1) / max(number - 1, 1)) for i in range(number)]
    kept = set(unusual) & set(spread)
    for row in unusual:
        replaceable = [taken for taken in spread if taken not in kept]
        if row not in spread and replaceable:
            spread.remove(min(replaceable, key=lambda taken: abs(taken - row)))
            spread.append(row)
            kept.add(row)
    return sorted(spread)
