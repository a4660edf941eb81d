"""Which rows a step is for: a function of the seed and of the step alone, so that any step can be had at once.

batch(n) = tokens[starts(seed, n) + (0 ... length)]
"""

import numpy as np
import numpy.typing as npt

from .corpus import Tokens

Rows = npt.NDArray[np.int64]

WEIGHTS, BATCHES, DROPOUT, SAMPLE = range(4)
"""What random numbers are for."""


def random_of(seed: int, purpose: int, step: int = 0) -> np.random.Generator:
    """A stream of random numbers of its own for each purpose and step."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, purpose, step]))


def batch_of_step(tokens: Tokens, *, step: int, rows: int, length: int, seed: int) -> Rows:
    """The rows of a step, each of `length` tokens and the one that follows them."""
    starts = random_of(seed, BATCHES, step).integers(len(tokens) - length, size=(rows, 1))
    return _rows(tokens, starts, length)


def spread_over(tokens: Tokens, *, rows: int, length: int) -> Rows:
    """At most `rows` rows, evenly spread, that do not overlap."""
    rows = min(rows, (len(tokens) - 1) // length)
    starts = np.linspace(0, len(tokens) - length - 1, rows).astype(np.int64)[:, None]
    return _rows(tokens, starts, length)


def _rows(tokens: Tokens, starts: Rows, length: int) -> Rows:
    rows: Rows = tokens[starts + np.arange(length + 1)].astype(np.int64)
    return rows
