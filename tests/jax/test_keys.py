"""Random keys: one for each piece."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from problems import assert_same, make_batch, make_params, predict

from wholebatch.jax import value_and_grad

KEYS = {"typed": jax.random.key(3), "raw": jax.random.PRNGKey(3)}


def dropped(params, key, x, y):
    """Dropout of whole rows, by a mask that depends on the key alone."""
    keep = jax.random.bernoulli(key, 0.5, (1,))
    return ((keep * predict(params, x) - y) ** 2).mean()


def by_hand(params, key, x, y, size):
    """The same pieces, keys and weights, in a loop."""
    full, rest = divmod(len(y), size)
    keys = jax.random.split(key, full + bool(rest))
    if rest:
        pieces = [slice(i * size, (i + 1) * size) for i in range(full + 1)]
    else:
        pieces = [slice(i, None, full) for i in range(full)]
    losses = [
        jax.value_and_grad(dropped)(params, key, x[piece], y[piece]) for key, piece in zip(keys, pieces, strict=True)
    ]
    shares = [len(y[piece]) / len(y) for piece in pieces]
    return jax.tree.map(lambda *parts: sum(s * part for s, part in zip(shares, parts, strict=True)), *losses)


@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_dropout_is_that_of_a_loop_over_the_same_pieces(key, size):
    params, batch = make_params(), make_batch()
    split = jax.jit(value_and_grad(dropped, rng_argnums=1, micro_batch_size=size))(params, key, *batch)
    assert_same(split, by_hand(params, key, *batch, size))


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_one_piece_gets_the_key_as_it_is(key):
    params, batch = make_params(), make_batch()
    split = value_and_grad(dropped, rng_argnums=(1,))(params, key, *batch)
    assert_same(split, jax.value_and_grad(dropped)(params, key, *batch))


def test_a_key_that_is_not_split_gives_every_piece_the_same_numbers():
    """The negative control: with a key in a closure the numbers do not differ between pieces."""
    drawn = []

    def fun(params, key, x):
        jax.debug.callback(lambda n: drawn.append(float(n)), jax.random.uniform(key))
        return (params * x).mean()

    key = jax.random.key(0)
    value_and_grad(fun, rng_argnums=1, micro_batch_size=2)(jnp.ones(()), key, jnp.ones(8))
    jax.effects_barrier()
    assert len(set(drawn)) == 4
    drawn.clear()
    value_and_grad(lambda p, x: fun(p, key, x), micro_batch_size=2)(jnp.ones(()), jnp.ones(8))
    jax.effects_barrier()
    assert len(drawn) == 4
    assert len(set(drawn)) == 1


def test_trees_of_keys():
    def fun(params, keys, x):
        noise = jax.random.normal(keys["a"], x.shape) + jax.random.normal(keys["b"], x.shape)
        return (params * (x + noise)).mean()

    keys = dict(zip("ab", jax.random.split(jax.random.key(0)), strict=True))
    loss, _ = value_and_grad(fun, rng_argnums=1, micro_batch_size=2)(jnp.ones(()), keys, jnp.ones(8))
    again, _ = value_and_grad(fun, rng_argnums=1, micro_batch_size=2)(jnp.ones(()), keys, jnp.ones(8))
    assert loss == again
    assert np.isfinite(loss)


@pytest.mark.parametrize(
    "not_a_key", [jnp.ones(3), 7, jax.random.split(jax.random.key(0), 3)], ids=["floats", "number", "several"]
)
def test_what_is_not_a_key_is_refused(not_a_key):
    with pytest.raises(TypeError, match="not a random key"):
        value_and_grad(dropped, rng_argnums=1, micro_batch_size=4)(make_params(), not_a_key, *make_batch())
