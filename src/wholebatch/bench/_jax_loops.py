"""Who takes part in JAX, each written the way its documentation says.

A gradient is a function of the parameters and a batch, of which `step_of` makes a compiled training step.
`optax.MultiSteps` is an optimizer, which is given one piece at a time; its documentation's example donates nothing, so
that it takes part both ways. https://optax.readthedocs.io/en/latest/_collections/examples/gradient_accumulation.html
"""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import Array, lax
from jax import numpy as jnp

from ..jax import value_and_grad
from ._case import MULTI_STEPS, MULTI_STEPS_DONATED, OURS, UNSPLIT

Loss = Callable[[Any, Array, Array], Array]
Gradient = Callable[[Any, Array, Array], tuple[Array, Any]]


def _cut(leaf: Array, size: int) -> Array:
    return leaf.reshape(-1, size, *leaf.shape[1:])


def _scan_by_hand(loss: Loss, size: int) -> Gradient:
    def of_batch(params: Any, ids: Array, labels: Array) -> tuple[Array, Any]:
        def add_piece(sums: Any, piece: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params, *piece)), None

        pieces = _cut(ids, size), _cut(labels, size)
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        sums, _ = lax.scan(add_piece, zeros, pieces)
        mean: tuple[Array, Any] = jax.tree.map(lambda total: total / len(pieces[0]), sums)
        return mean

    return of_batch


def _unrolled(loss: Loss, size: int) -> Gradient:
    def of_batch(params: Any, ids: Array, labels: Array) -> tuple[Array, Any]:
        pieces = list(zip(_cut(ids, size), _cut(labels, size), strict=True))
        sums = jax.value_and_grad(loss)(params, *pieces[0])
        for piece in pieces[1:]:
            sums = jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params, *piece))
        mean: tuple[Array, Any] = jax.tree.map(lambda total: total / len(pieces), sums)
        return mean

    return of_batch


def _microbatch(loss: Loss, size: int) -> Gradient:
    gradient: Gradient = optax.microbatch(
        jax.value_and_grad(loss),
        argnums=(1, 2),
        microbatch_size=size,
        accumulator=optax.microbatching.AccumulationType.MEAN,
    )
    return gradient


GRADIENTS: dict[str, Callable[[Loss, int], Gradient]] = {
    "scan by hand": _scan_by_hand,
    UNSPLIT: lambda loss, size: jax.value_and_grad(loss),
    "unrolled loop": _unrolled,
    "optax.microbatch": _microbatch,
    MULTI_STEPS: lambda loss, size: jax.value_and_grad(loss),
    MULTI_STEPS_DONATED: lambda loss, size: jax.value_and_grad(loss),
    OURS: lambda loss, size: value_and_grad(loss, micro_batch_size=size),
}


def step_of(gradient: Gradient, optimizer: Any, *, donated: bool) -> Any:
    """A training step, to be compiled.

    Args:
        gradient: of a batch.
        optimizer: takes the step.
        donated: whether the state before it is given away.
    """

    def step(params: Any, state: Any, ids: Array, labels: Array) -> tuple[Any, Any, Array]:
        loss, gradients = gradient(params, ids, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1) if donated else ())
