"""What a loss function reports besides is that of the whole batch."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from problems import assert_same, make_batch, make_params, predict, squares

from wholebatch import Mean, Sum
from wholebatch.jax import value_and_grad

SIZES = [1, 4, 5, 10]


def run(fun, micro_batch_size, aux="auto", batch=None):
    step = jax.jit(value_and_grad(fun, has_aux=True, micro_batch_size=micro_batch_size, aux=aux))
    return step(make_params(), *(make_batch() if batch is None else batch))[0][1]


@pytest.mark.parametrize("size", SIZES)
def test_auto_reduces_each_leaf_as_its_shape_and_dtype_say(size):
    def fun(params, x, y):
        losses = squares(params, x, y)
        return losses.mean(), {
            "rows": losses,
            "entries": jnp.stack([losses, -losses], 1).reshape(-1),
            "right": (losses < 1).sum(),
            "mean": losses.mean(),
            "vector": x.mean(0),
        }

    params, batch = make_params(), make_batch()
    assert_same(run(fun, size), fun(params, *batch)[1])


@pytest.mark.parametrize("size", SIZES)
def test_ratios_and_sums_are_reported_as_numbers(size):
    def fun(params, x, y):
        losses = squares(params, x, y)
        return losses.mean(), {"masked": Mean.of(losses, where=y > 0), "sum": Sum(losses.sum()), "rows": Sum(len(y))}

    _, y = make_batch()
    losses = squares(make_params(), *make_batch())
    expected = {"masked": losses[y > 0].mean(), "sum": losses.sum(), "rows": jnp.asarray(10)}
    assert_same(run(fun, size), expected)


def test_averages_are_weighted_by_the_objectives_count():
    def fun(params, x, y):
        kept = y > 0
        losses = squares(params, x, y)
        mean = (losses * kept).sum() / jnp.maximum(kept.sum(), 1)
        return Mean((losses * kept).sum(), kept.sum()), mean

    _, y = make_batch()
    losses = squares(make_params(), *make_batch())
    assert np.isclose(run(fun, 4), losses[y > 0].mean(), rtol=1e-12)


def test_averages_are_weighted_by_rows_where_there_are_several_terms():
    def fun(params, x, y):
        losses = squares(params, x, y)
        return {"a": Mean((losses * (y > 0)).sum(), (y > 0).sum()), "b": losses.mean()}, losses.mean()

    assert np.isclose(run(fun, 4), squares(make_params(), *make_batch()).mean(), rtol=1e-12)


def test_modes_by_name():
    def fun(params, x, y):
        return squares(params, x, y).mean(), {"n": len(y) * jnp.ones(()), "x": x.sum(0), "pair": (x, y)}

    modes = {"n": "stack", "x": "sum", "pair": "concat"}
    found = run(fun, 4, modes)
    assert found["n"].tolist() == [4, 4, 2]
    x, y = make_batch()
    assert_same({"x": found["x"], "pair": found["pair"]}, {"x": x.sum(0), "pair": (x, y)})
    assert run(fun, 10, modes)["n"].tolist() == [10]
    assert run(fun, 4, "mean" if False else {"n": "mean", "x": "stack", "pair": "auto"})["x"].shape == (3, 3)


def test_entries_of_pieces_without_a_row_axis_are_put_together_in_the_order_of_the_pieces():
    def fun(params, x, y):
        return squares(params, x, y).mean(), jnp.stack([y.sum(), y.sum()])

    assert run(fun, 4, "concat").shape == (6,)


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        ("median", "aux must hold .*got .median."),
        ({"other": "sum"}, "modes in the structure of what is reported"),
    ],
)
def test_modes_that_cannot_be_meant(aux, message):
    with pytest.raises(ValueError, match=message):
        run(lambda p, x, y: (squares(p, x, y).mean(), {"y": y}), 4, aux)


def test_scalars_cannot_be_put_together():
    with pytest.raises(ValueError, match='use "stack" for scalars'):
        run(lambda p, x, y: (squares(p, x, y).mean(), y.sum()), 4, "concat")


def test_random_keys_cannot_be_averaged():
    def fun(params, x, y):
        return squares(params, x, y).mean(), jax.random.key(0)

    with pytest.raises(TypeError, match='aux="stack"'):
        run(fun, 4)
    assert run(fun, 4, "stack").shape == (3,)


def test_low_precision_averages_do_not_lose_their_dtype_or_their_digits():
    def fun(params, x, y):
        return squares(params, x, y).mean(), {"one": jnp.ones((), jnp.bfloat16), "count": jnp.ones((), jnp.int8)}

    found = run(fun, 1, {"one": "sum", "count": "sum"}, make_batch(rows=600))
    assert found["one"].dtype == jnp.bfloat16
    assert found["one"] == 600
    assert found["count"].dtype == jnp.int8


def test_a_flag_is_averaged():
    assert run(lambda p, x, y: (squares(p, x, y).mean(), (y > 0).any()), 10).dtype == bool
    assert run(lambda p, x, y: (squares(p, x, y).mean(), (y < 9).any()), 5) == 1.0


def test_a_structure_that_depends_on_params_is_kept():
    def fun(params, x, y):
        return squares(params, x, y).mean(), (predict(params, x), None, [y])

    params, (x, y) = make_params(), make_batch()
    assert_same(run(fun, 4), (predict(params, x), None, [y]))
