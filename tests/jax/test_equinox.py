"""Equinox: models are trees, partitioned into what is trained and what is not."""

import equinox as eqx
import jax
import optax
from jax import numpy as jnp
from problems import assert_same, make_batch

from wholebatch.jax import value_and_grad


def make_model():
    return eqx.nn.MLP(3, "scalar", 8, 2, dtype=float, key=jax.random.key(0))


def loss_fn(params, static, x, y):
    model = eqx.combine(params, static)
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def test_a_partitioned_model():
    params, static = eqx.partition(make_model(), eqx.is_inexact_array)
    split = value_and_grad(loss_fn, micro_batch_size=4)(params, static, *make_batch())
    whole = jax.value_and_grad(loss_fn)(params, static, *make_batch())
    assert_same(split, whole)
    optimizer = optax.adam(1e-2)
    updates, _ = optimizer.update(split[1], optimizer.init(params), params)
    assert isinstance(eqx.combine(eqx.apply_updates(params, updates), static), eqx.nn.MLP)


def test_under_filter_jit_as_filter_value_and_grad():
    @eqx.filter_jit
    def step(model, x, y):
        params, static = eqx.partition(model, eqx.is_inexact_array)
        return value_and_grad(loss_fn, micro_batch_size=5)(params, static, x, y)

    loss, grads = step(make_model(), *make_batch())
    whole_loss, whole = eqx.filter_value_and_grad(lambda m, x, y: jnp.mean((jax.vmap(m)(x) - y) ** 2))(
        make_model(), *make_batch()
    )
    assert_same((loss, grads), (whole_loss, whole))
