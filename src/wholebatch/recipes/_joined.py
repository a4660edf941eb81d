"""Micro-batches put together: where all of them are at hand, they are one batch, which the library cuts."""

from collections.abc import Iterable
from typing import Any

from jax import Array
from jax import numpy as jnp

from wholebatch import BatchError


def joined(x_batches: Iterable[Any], y_batches: Iterable[Any], *, target_axes: int) -> tuple[Array, Array, int]:
    """The batch that micro-batches make, as `(x, y, rows of the largest)`.

    Args:
        x_batches: arrays of rows of features.
        y_batches: the targets of each.
        target_axes: how many axes targets have: a prediction of another shape would be broadcast against them.
    """
    xs, ys = [jnp.asarray(x) for x in x_batches], [jnp.asarray(y) for y in y_batches]
    if len(xs) != len(ys):
        raise BatchError(f"{len(xs)} micro-batches of x and {len(ys)} of y: give as many of each")
    for k, (x, y) in enumerate(zip(xs, ys, strict=True), start=1):
        if x.ndim != 2 or y.ndim != target_axes or len(x) != len(y):
            wanted = "(M, D) and (M,)" if target_axes == 1 else "(M, D_in) and (M, D_out)"
            raise BatchError(f"micro-batch {k}: x has shape {x.shape} and y {y.shape}, they must have {wanted}")
    sizes = [len(x) for x in xs]
    if not any(sizes):
        raise BatchError("the batch is empty: its micro-batches have 0 rows")
    return jnp.concatenate(xs), jnp.concatenate(ys), max(sizes)
