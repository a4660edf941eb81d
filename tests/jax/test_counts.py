"""Zero counts, and which counts are accepted."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from problems import assert_same, make_batch, make_params, squares

from wholebatch import Mean, Sum
from wholebatch.jax import value_and_grad


def nan_where_nothing_counts(params, x, y):
    """As many write it: the mean over what counts, which is 0 / 0 in a fully masked piece."""
    kept = y > 0
    return Mean((squares(params, x, y) * kept).sum() / kept.sum() * kept.sum(), kept.sum())


def batch_with_empty_pieces():
    """Rows that count, and rows that do not; whatever shares a piece, some pieces of two are empty."""
    x, _ = make_batch(12)
    return x, jnp.asarray([1.0, -1, -1] * 4)


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_a_piece_that_counts_nothing_adds_nothing(size):
    params, (x, y) = make_params(), batch_with_empty_pieces()
    split = value_and_grad(nan_where_nothing_counts, micro_batch_size=size)(params, x, y)
    kept = y > 0
    assert_same(split, jax.value_and_grad(lambda p: squares(p, x[kept], y[kept]).mean())(params))


def test_the_plain_mean_of_means_is_not_a_number_there():
    params, (x, y) = make_params(), batch_with_empty_pieces()
    means = [nan_where_nothing_counts(params, x[i : i + 1], y[i : i + 1]).value for i in range(len(y))]
    assert not np.isfinite(sum(means))


@pytest.mark.parametrize("size", [2, 12])
@pytest.mark.parametrize("several", [False, True], ids=["one term", "several"])
def test_a_batch_that_counts_nothing_has_loss_0_and_gradient_0(size, several):
    def fun(params, x, y):
        mean = nan_where_nothing_counts(params, x, y)
        return (
            {"a": Mean.of(squares(params, x, y), where=y > 0), "b": Mean.of(x[:, 0], where=y > 0)} if several else mean
        )

    params, (x, y) = make_params(), batch_with_empty_pieces()
    loss, grads = jax.jit(value_and_grad(fun, micro_batch_size=size))(params, x, -jnp.abs(y))
    assert loss == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    "count", [4, np.int64(4), 4.0, jnp.asarray(4), jnp.asarray(4, jnp.int8), jnp.asarray(4, jnp.bfloat16), True]
)
def test_counts_of_every_kind(count):
    def fun(params, x, y):
        return Mean(squares(params, x, y).sum(), count)

    params, batch = make_params(), make_batch(8)
    loss, _ = value_and_grad(fun, micro_batch_size=2)(params, *batch)
    assert np.isclose(loss, squares(params, *batch).sum() / (4 * float(count)), rtol=1e-12)


def test_integer_counts_stay_integers():
    """In float32 adding 1 to 2^24 gives 2^24."""
    with jax.enable_x64(False):

        def fun(w, x):
            return Mean(w * x.sum(dtype=jnp.float32), x.sum())

        x = jnp.asarray([2**24, 1, 1, 1], jnp.int32)
        _, aux_free = value_and_grad(fun, micro_batch_size=1)(jnp.float32(1), x)
        assert np.isfinite(aux_free)
        counts = value_and_grad(lambda w, x: (fun(w, x), Sum(x.sum())), has_aux=True, micro_batch_size=1)
        assert counts(jnp.float32(1), x)[0][1] == 2**24 + 3


def test_a_count_that_depends_on_what_is_differentiated_is_refused():
    def fun(params, x, y):
        weights = jnp.exp(params["out"].sum() * y)
        return Mean((squares(params, x, y) * weights).sum(), weights.sum())

    for size in (4, 10):
        with pytest.raises(ValueError, match="depends on what is differentiated.*stop_gradient"):
            jax.jit(value_and_grad(fun, micro_batch_size=size))(make_params(), *make_batch())


def test_a_count_that_is_held_constant_is_fine():
    def fun(params, x, y):
        weights = jax.lax.stop_gradient(jnp.exp(params["out"].sum() * y))
        return Mean((squares(params, x, y) * weights).sum(), weights.sum())

    params, batch = make_params(), make_batch()
    whole = jax.value_and_grad(lambda *args: fun(*args).value)(params, *batch)
    assert_same(value_and_grad(fun, micro_batch_size=4)(params, *batch), whole)
