"""An optimizer whose step is once per window, for sources that yield one micro-batch a call.

    g = Σ_k count_k · g_k / Σ_k count_k        over the micro-batches of a window

where g_k is the gradient of the mean over micro-batch k. The inner optimizer runs once per window; between, it and its
state are not touched.
"""

from typing import Any, NamedTuple, Protocol

import jax
from jax import Array, lax
from jax import numpy as jnp

from .._plan import positive_integer
from ._loss import as_count, at_least_32_bits
from ._tree import Tree


class Optimizer(Protocol):
    """What optax calls a gradient transformation."""

    init: Any
    update: Any


class MultiStepsState(NamedTuple):
    """What is pending, and the inner optimizer's state.

    Args:
        micro_step: how many micro-batches the open window holds.
        counted: what they counted.
        gradients: their sum, each weighted by its count.
        inner: the inner optimizer's state.
        skipped: how many windows took no step, because they counted nothing or were not finite.
    """

    micro_step: Array
    counted: Array
    gradients: Tree
    inner: Tree
    skipped: Array


class MultiSteps(NamedTuple):
    """What `multi_steps` returns; stands where optax takes a gradient transformation."""

    init: Any
    update: Any
    finish: Any


def multi_steps(optimizer: Optimizer, every: int) -> MultiSteps:
    """Let an optimizer take one step for every `every` micro-batches.

    `update(grads, state, params, count=1)` takes the gradient of one micro-batch's mean loss and what the mean was
    taken over, and returns updates that are zero until the window is full. `finish(state, params)` takes the step of a
    short last window. A window that counted nothing, or whose gradient is not finite, takes no step.

    Args:
        optimizer: an optax optimizer, or anything with its `init` and `update`.
        every: the number of micro-batches in a window.

    >>> import optax
    >>> optimizer = multi_steps(optax.sgd(1.0), every=2)
    >>> params = jnp.zeros(1)
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update(jnp.ones(1), state, params, count=3)
    >>> updates.tolist()
    [0.0]
    >>> updates, state = optimizer.update(jnp.full(1, 5.0), state, params, count=1)
    >>> updates.tolist()
    [-2.0]
    """
    positive_integer("every", every)

    def init(params: Tree) -> MultiStepsState:
        zero = jnp.zeros((), jnp.int32)
        return MultiStepsState(zero, jnp.zeros(()), _zeros(params), optimizer.init(params), zero)

    def update(
        grads: Tree, state: MultiStepsState, params: Tree = None, count: Any = 1, **extra: Any
    ) -> tuple[Tree, MultiStepsState]:
        weight = as_count("a micro-batch", count).astype(state.counted.dtype)
        state = state._replace(
            micro_step=state.micro_step + 1,
            counted=state.counted + weight,
            gradients=jax.tree.map(lambda total, g: total + _weighted(g, weight, total), state.gradients, grads),
        )
        return _step_if(state.micro_step == every, grads, state, params, extra)

    def finish(state: MultiStepsState, params: Tree = None, **extra: Any) -> tuple[Tree, MultiStepsState]:
        like = state.gradients if params is None else params
        return _step_if(state.micro_step > 0, like, state, params, extra)

    def _step_if(
        full: Array, like: Tree, state: MultiStepsState, params: Tree, extra: dict[str, Any]
    ) -> tuple[Tree, MultiStepsState]:
        divisor = jnp.where(state.counted == 0, 1, state.counted)
        mean = jax.tree.map(lambda total, g: (total / divisor).astype(g.dtype), state.gradients, like)
        sound = full & (state.counted != 0) & _all_finite(mean)

        def step() -> tuple[Tree, Tree]:
            updates, inner = optimizer.update(mean, state.inner, params, **extra)
            return updates, inner

        updates_shape = jax.eval_shape(step)[0]
        updates, inner = lax.cond(sound, step, lambda: (jax.tree.map(_zeros_of, updates_shape), state.inner))
        micro_step, counted, gradients = jax.tree.map(
            lambda pending: jnp.where(full, 0, pending), (state.micro_step, state.counted, state.gradients)
        )
        return updates, MultiStepsState(micro_step, counted, gradients, inner, state.skipped + (full & ~sound))

    return MultiSteps(init, update, finish)


def _weighted(gradient: Array, weight: Array, total: Array) -> Array:
    """In the sum's dtype; what counts nothing adds nothing, not even a NaN."""
    return jnp.where(weight == 0, 0, gradient.astype(total.dtype) * weight.astype(total.dtype))


def _zeros(params: Tree) -> Tree:
    return jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), at_least_32_bits(jnp.result_type(p))), params)


def _zeros_of(shape: Any) -> Array:
    return jnp.zeros(shape.shape, shape.dtype)


def _all_finite(tree: Tree) -> Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()
