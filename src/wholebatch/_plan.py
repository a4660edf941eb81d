"""How many rows each piece of a batch gets.

    rows = Σ sizes,   max(sizes) - min(sizes) <= 1

Balanced pieces have at most two sizes, so compilers see at most two shapes, and no piece is much smaller
than the memory allows.
"""

import operator
from typing import Any

from ._errors import OptionError, OptionTypeError


def balanced(rows: int, *, micro_batch_size: int | None = None, num_micro_batches: int | None = None) -> list[int]:
    """Sizes of the pieces of a batch, largest first; without a size there is one piece.

    >>> balanced(10, micro_batch_size=4)
    [4, 3, 3]
    >>> balanced(3, num_micro_batches=8)
    [1, 1, 1]
    """
    pieces = min(num_micro_batches or 1, rows) if micro_batch_size is None else -(-rows // micro_batch_size)
    small, larger_ones = divmod(rows, pieces)
    return [small + 1] * larger_ones + [small] * (pieces - larger_ones)


def check_sizes(micro_batch_size: Any, num_micro_batches: Any) -> tuple[int | None, int | None]:
    """The sizes as integers, or an error where they cannot be meant."""
    if micro_batch_size is not None and num_micro_batches is not None:
        raise OptionError(
            f"both micro_batch_size={micro_batch_size!r} and num_micro_batches={num_micro_batches!r} were "
            "given: give one of them, the other follows from the batch"
        )
    if micro_batch_size is not None:
        micro_batch_size = positive_integer("micro_batch_size", micro_batch_size)
    if num_micro_batches is not None:
        num_micro_batches = positive_integer("num_micro_batches", num_micro_batches)
    return micro_batch_size, num_micro_batches


def positive_integer(name: str, value: Any, *, least: int = 1) -> int:
    """`value` as an int of at least `least`, or an error that names the option."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise OptionTypeError(f"{name} must be a positive integer, got {value!r} of type {type(value).__name__}")
    if number < least:
        raise OptionError(f"{name} must be at least {least}, got {number}")
    return number
