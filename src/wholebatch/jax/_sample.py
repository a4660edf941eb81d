"""A few rows of a batch, and the precision to look at them in."""

from typing import Any

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from .._sample import rows_to_take, rows_to_use


def chosen_rows(leaves: list[Array], micro_batch_size: int | None) -> np.ndarray:
    """Some that are spread over the batch, and those that count least and most.

    Args:
        leaves: arrays with the rows on their leading axis.
        micro_batch_size: a size of pieces that the rows have to be enough for.
    """
    rows = len(leaves[0])
    return np.asarray(rows_to_take(rows, rows_to_use(rows, micro_batch_size), _unusual_rows(leaves)))


def widest(leaf: Any) -> Any:
    """In float64, if that is switched on."""
    if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    return jnp.asarray(leaf, jnp.result_type(complex if jnp.iscomplexobj(leaf) else float))


def as_it_is(leaf: Any) -> Any:
    """In its own precision."""
    return leaf


def _unusual_rows(leaves: list[Array]) -> list[int]:
    """Rows with the fewest and with the most entries that count for nothing: zeros in a mask, ignored labels."""
    found = []
    for leaf in leaves:
        if leaf.size and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            array = np.asarray(leaf)
            empty = ((array == 0) | (array == -100)).reshape(len(array), -1).sum(1)
            if empty.min() < empty.max():
                found += [int(empty.argmin()), int(empty.argmax())]
    return found
