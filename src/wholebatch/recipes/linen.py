"""Flax Linen: one step of a `TrainState` with the gradient of several micro-batches.

    g = Σ_k M_k g_k / Σ_k M_k

where g_k is the gradient of the mean over micro-batch k, of M_k rows. That is the gradient of the mean over all rows,
so the library is given all of them and cuts; parameters are a tree, and the step returns a new state.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import Array
from jax import numpy as jnp

from wholebatch.jax import grad

from ._agreement import steps_agree
from ._joined import joined

__all__ = ["grad_accumulation_step", "main"]


def loss_fn(params: Any, apply_fn: Callable[..., Array], x: Array, y: Array) -> Array:
    """The squared error, averaged over rows."""
    return jnp.mean((apply_fn({"params": params}, x)[:, 0] - y) ** 2)


def create_state(seed: float, x: Array, lr: float) -> TrainState:
    """A dense layer with one output, and plain SGD."""
    model = nn.Dense(1)
    params = model.init(jax.random.PRNGKey(int(seed)), x)["params"]
    state: TrainState = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(lr))
    return state


def grad_accumulation_step(
    seed: float, x_batches: Array | Sequence[Array], y_batches: Array | Sequence[Array], lr: float
) -> Array:
    """One step with the gradient of all micro-batches; the mean squared error on all of them after it.

    Args:
        seed: of the initial weights, cast to int.
        x_batches: of shape (N, M, D); or a list of N arrays (M_k, D), which may differ in M_k.
        y_batches: of shape (N, M); or a list of N arrays (M_k,).
        lr: the learning rate of SGD.

    Returns:
        An array of shape (1,).

    >>> x, y = jnp.arange(12.0).reshape(2, 3, 2), jnp.ones((2, 3))
    >>> grad_accumulation_step(0.0, x, y, 0.01).shape
    (1,)
    """
    x, y, rows = joined(x_batches, y_batches, target_axes=1)
    state = create_state(seed, x, lr)
    grads = grad(loss_fn, micro_batch_size=rows)(state.params, state.apply_fn, x, y)
    state = state.apply_gradients(grads=grads)
    return loss_fn(state.params, state.apply_fn, x, y)[None]


def main(*, micro_batches: int = 2, rows: int = 8, features: int = 3, lr: float = 0.1, seed: int = 0) -> bool:
    """One step on micro-batches of random data, beside a plain step on the full batch.

    Args:
        micro_batches: how many there are.
        rows: rows of each.
        features: features of a row.
        lr: the learning rate.
        seed: of data and weights.
    """
    x_key, y_key = jax.random.split(jax.random.PRNGKey(seed))
    x = jax.random.normal(x_key, (micro_batches, rows, features))
    y = jax.random.normal(y_key, (micro_batches, rows))
    accumulated = grad_accumulation_step(seed, x, y, lr).item()

    x, y = x.reshape(-1, features), y.reshape(-1)
    state = create_state(seed, x, lr)
    before, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, x, y)
    state = state.apply_gradients(grads=grads)
    full = loss_fn(state.params, state.apply_fn, x, y).item()
    return steps_agree(before.item(), f"{micro_batches} micro-batches of {rows} rows", accumulated, full)


if __name__ == "__main__":
    sys.exit(not main())
