"""Flax NNX: one update, in place, with the gradient of two micro-batches that may differ in size.

    g = (M_a g_a + M_b g_b) / (M_a + M_b)

where g_a is the gradient of the mean over M_a rows: the gradient of the mean over all rows. The model is an object, so
the optimizer changes the model that it is given, and there is no new one.
"""

import sys

import jax
import optax
from flax import nnx
from jax import Array
from jax import numpy as jnp

from wholebatch.jax.nnx import value_and_grad

from ._agreement import steps_agree
from ._joined import joined

__all__ = ["grad_accumulation_step", "main"]


def loss_fn(model: nnx.Linear, x: Array, y: Array) -> Array:
    """The squared error, averaged over rows and outputs."""
    return jnp.mean((model(x) - y) ** 2)


def create(seed: float, d_in: int, d_out: int, lr: float) -> tuple[nnx.Linear, nnx.Optimizer[nnx.Linear]]:
    """A linear layer, and plain SGD on it."""
    model = nnx.Linear(d_in, d_out, rngs=nnx.Rngs(int(seed)))
    return model, nnx.Optimizer(model, optax.sgd(lr), wrt=nnx.Param)


def grad_accumulation_step(seed: float, x_a: Array, y_a: Array, x_b: Array, y_b: Array, lr: float) -> Array:
    """One update with the gradient of both micro-batches; the mean squared error on both after it.

    Args:
        seed: of the initial weights, cast to int.
        x_a: features of the first micro-batch, (M, D_in).
        y_a: its targets, (M, D_out).
        x_b: features of the second, which may have another M.
        y_b: its targets.
        lr: the learning rate of SGD.

    Returns:
        An array of shape (1,).

    >>> x, y = jnp.arange(10.0).reshape(5, 2), jnp.ones((5, 3))
    >>> grad_accumulation_step(0.0, x[:2], y[:2], x[2:], y[2:], 0.01).shape
    (1,)
    """
    x, y, rows = joined([x_a, x_b], [y_a, y_b], target_axes=2)
    model, optimizer = create(seed, x.shape[1], y.shape[1], lr)
    _, grads = value_and_grad(loss_fn, micro_batch_size=rows)(model, x, y)
    optimizer.update(model, grads)
    return loss_fn(model, x, y)[None]


def main(*, rows_a: int = 8, rows_b: int = 5, d_in: int = 3, d_out: int = 2, lr: float = 0.1, seed: int = 0) -> bool:
    """One update on two micro-batches of random data, beside a plain one on the full batch.

    Args:
        rows_a: rows of the first micro-batch.
        rows_b: rows of the second.
        d_in: features of a row.
        d_out: targets of a row.
        lr: the learning rate.
        seed: of data and weights.
    """
    x_key, y_key = jax.random.split(jax.random.PRNGKey(seed))
    x = jax.random.normal(x_key, (rows_a + rows_b, d_in))
    y = jax.random.normal(y_key, (rows_a + rows_b, d_out))
    accumulated = grad_accumulation_step(seed, x[:rows_a], y[:rows_a], x[rows_a:], y[rows_a:], lr).item()

    model, optimizer = create(seed, d_in, d_out, lr)
    before, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, grads)
    full = loss_fn(model, x, y).item()
    return steps_agree(before.item(), f"micro-batches of {rows_a} and {rows_b} rows", accumulated, full)


if __name__ == "__main__":
    sys.exit(not main())
