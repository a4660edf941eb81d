"""Flax Linen: `TrainState` as ever, mutable collections through aux."""

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import numpy as jnp
from problems import assert_same, make_batch

from wholebatch.jax import value_and_grad


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), int))
        calls.value += 1
        x = nn.Dense(8, param_dtype=float)(x)
        self.sow("intermediates", "hidden", x)
        return nn.Dense(1, param_dtype=float)(jnp.tanh(x))[:, 0]


def make_state():
    model = Net()
    variables = model.init(jax.random.key(0), make_batch()[0])
    return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-2))


def loss_fn(params, apply_fn, x, y):
    predicted, changed = apply_fn(
        {"params": params, "counters": {"calls": 0}}, x, mutable=["counters", "intermediates"]
    )
    return jnp.mean((predicted - y) ** 2), changed


def train(value_and_grad):
    @jax.jit
    def step(state, x, y):
        def of_params(params, x, y):
            return loss_fn(params, state.apply_fn, x, y)

        (loss, changed), grads = value_and_grad(of_params, has_aux=True)(state.params, x, y)
        return state.apply_gradients(grads=grads), loss, changed

    state = make_state()
    for i in range(10):
        state, loss, changed = step(state, *make_batch(seed=i))
    return state, loss, changed


def test_training_is_that_of_whole_batches_and_collections_come_through_aux():
    state, loss, changed = train(lambda fun, has_aux: value_and_grad(fun, has_aux=has_aux, micro_batch_size=4))
    whole_state, whole_loss, whole_changed = train(jax.value_and_grad)
    assert_same((loss, state.params), (whole_loss, whole_state.params), tolerance=1e-10)
    assert_same(changed["intermediates"], whole_changed["intermediates"], tolerance=1e-10)
    assert changed["counters"]["calls"] == 3, "once per piece, as an integer is summed"
    start = make_state().params
    assert any(
        np.abs(a - b).max() > 1e-2 for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(start), strict=True)
    )


def test_dropout_with_a_key_for_each_piece():
    class Dropping(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5, deterministic=False)(nn.Dense(1, param_dtype=float)(x))[:, 0]

    x, y = make_batch()
    model = Dropping()
    params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)

    def loss_fn(params, key, x, y):
        return jnp.mean((model.apply(params, x, rngs={"dropout": key}) - y) ** 2)

    key, size = jax.random.key(2), 4
    split = value_and_grad(loss_fn, rng_argnums=1, micro_batch_size=size)(params, key, x, y)
    keys = jax.random.split(key, 3)
    parts = [jax.value_and_grad(loss_fn)(params, keys[i], x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4]) for i in range(3)]
    by_hand = jax.tree.map(lambda a, b, c: 0.4 * a + 0.4 * b + 0.2 * c, *parts)
    assert_same(split, by_hand)


def test_batch_norm_goes_by_piece_and_check_finds_it():
    from wholebatch.jax import check

    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(nn.BatchNorm(use_running_average=False)(x))[:, 0]

    x, y = make_batch()
    model = Normed()
    variables = model.init(jax.random.key(0), x)

    def loss_fn(params, x, y):
        predicted, _ = model.apply({**variables, "params": params}, x, mutable=["batch_stats"])
        return jnp.mean((predicted - y) ** 2)

    assert not check(loss_fn, variables["params"], x, y).exact
