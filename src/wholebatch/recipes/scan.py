"""JAX: the gradient of a sum over all rows, summed over equal chunks by `lax.scan`.

    d/dw Σ_i (w x_i - y_i)²  =  Σ_k d/dw Σ_{i in chunk k} (w x_i - y_i)²

A sum is not divided by anything, so the chunks' gradients add up as they are: to the library, a `Sum`.
"""

import sys
from typing import Any

import jax
from jax import Array
from jax import numpy as jnp

from wholebatch import BatchError, OptionError, OptionTypeError, Sum
from wholebatch.jax import grad

from ._agreement import ALLOWED, agree

__all__ = ["main", "microbatched_grads"]


def loss_fn(w: Array, x: Array, y: Array) -> Sum:
    """The squared error, summed over rows."""
    return Sum(jnp.sum((w * x - y) ** 2))


def microbatched_grads(w: Any, b: Any, x_full: Any, y_full: Any, n_microbatches: float) -> Array:
    """The gradient of `sum((w * x - y) ** 2)` with respect to `w`, on the memory of one chunk.

    Args:
        w: the weight, a scalar.
        b: not used.
        x_full: N inputs.
        y_full: N targets, or one for all.
        n_microbatches: the number of chunks; a float that is a whole number will do. Under `jit` it is static.

    >>> x, y = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.zeros(4)
    >>> microbatched_grads(1.0, 0.0, x, y, 2.0).item()
    60.0
    """
    x, y = jnp.asarray(x_full), jnp.asarray(y_full)
    chunks = _whole_number(n_microbatches)
    if x.ndim and x.shape[0] % chunks:
        raise BatchError(f"{x.shape[0]} rows cannot be cut into {chunks} equal chunks: give a number that divides them")
    w = jnp.asarray(w, jnp.result_type(w, float))  # an integer has no gradient
    gradient: Array = grad(loss_fn, num_micro_batches=chunks)(w, x, y)
    return gradient


def _whole_number(given: Any) -> int:
    if isinstance(given, jax.core.Tracer):
        raise OptionTypeError("n_microbatches is traced, but it decides on shapes: jit with static_argnums=4")
    try:
        number = float(given)
    except (TypeError, ValueError):
        raise OptionTypeError(f"n_microbatches must be a positive whole number, got {given!r}") from None
    if number < 1 or not number.is_integer():
        raise OptionError(f"n_microbatches must be a positive whole number, got {given}")
    return int(number)


def main(*, n: int = 1000, n_microbatches: int = 8, seed: int = 0) -> bool:
    """The gradient over chunks of random data, beside that of the full batch.

    Args:
        n: rows.
        n_microbatches: the number of chunks.
        seed: of the data.
    """
    x, y = jax.random.normal(jax.random.PRNGKey(seed), (2, n))
    chunked = microbatched_grads(0.5, 0.0, x, y, n_microbatches).item()
    full = jax.grad(lambda w: jnp.sum((w * x - y) ** 2))(0.5).item()
    print(f"gradient, {n_microbatches} chunks of {n // n_microbatches} rows   {chunked:.7g}")
    print(f"gradient, all {n} rows at once   {full:.7g}")
    return agree("the gradient, over its size", abs(chunked - full) / abs(full), ALLOWED["float32"])


if __name__ == "__main__":
    sys.exit(not main())
