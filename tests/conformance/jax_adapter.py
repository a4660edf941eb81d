"""The conformance table's view of `wholebatch.jax`."""

from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from conformance.cases import TRAINED, LossCase, Structure
from wholebatch.jax import value_and_grad

Arrays = dict[str, np.ndarray]


def to_jax(arrays: Arrays) -> dict[str, jax.Array]:
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def divided(params: Arrays) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """What is trained, and what is frozen."""
    arrays = to_jax(params)
    return {name: arrays.pop(name) for name in TRAINED}, arrays


def split(
    case: LossCase, params: Arrays, batch: Arrays, cut: dict[str, int], structure: Structure
) -> tuple[jax.Array, dict[str, jax.Array], Any, Arrays]:
    """The library's loss, terms, metrics and gradient."""
    trained, frozen = divided(params)

    def loss_fn(trained, packed):
        return case.split(trained | frozen, structure.unpack(packed), jnp)

    reports = bool(case.metrics)
    step = jax.jit(value_and_grad(loss_fn, has_aux=reports, return_terms=True, **cut))
    value, grads = step(trained, structure.pack(to_jax(batch)))
    (loss, terms), metrics = value if reports else (value, {})
    return loss, terms, metrics, to_numpy(grads)


def whole(objective: Any, params: Arrays, batch: Arrays) -> tuple[float, Arrays]:
    """JAX's own gradient of the unsplit batch."""
    trained, frozen = divided(params)
    loss, grads = jax.jit(jax.value_and_grad(lambda p: objective(p | frozen, to_jax(batch), jnp)))(trained)
    return float(loss), to_numpy(grads)


def naive_mean_of_means(objective: Any, params: Arrays, batch: Arrays, sizes: list[int]) -> Arrays:
    """The loop in most scripts: the mean of the pieces' means."""
    stops = np.cumsum(sizes)
    pieces = [
        whole(objective, params, {name: array[stop - size : stop] for name, array in batch.items()})[1]
        for size, stop in zip(sizes, stops, strict=True)
    ]
    return {name: np.mean([piece[name] for piece in pieces], axis=0) for name in pieces[0]}


def to_numpy(tree: dict[str, jax.Array]) -> Arrays:
    return {name: np.asarray(array) for name, array in tree.items()}
