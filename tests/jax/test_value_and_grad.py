"""`value_and_grad` takes and returns what JAX's own does."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from problems import assert_same, assert_same_types, loss_fn, make_batch, make_params, predict, squares

from wholebatch import Mean, Sum
from wholebatch.jax import grad, value_and_grad

CUTS = [{}, {"micro_batch_size": 1}, {"micro_batch_size": 4}, {"micro_batch_size": 5}, {"num_micro_batches": 3}]


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["under jit", "eagerly"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_value_and_gradient_are_those_of_the_unsplit_batch(cut, jit):
    params, batch = make_params(), make_batch()
    split = jit(value_and_grad(loss_fn, **cut))(params, *batch)
    whole = jax.value_and_grad(loss_fn)(params, *batch)
    assert_same(split, whole)
    assert_same_types(split, whole)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["under jit", "eagerly"])
def test_weak_types_stay_weak(cut, jit):
    """Else the parameters that are made of them would have another type in the next step, which is compiled anew."""

    def line(w, b, x, y):
        return (((x * w).sum(1) + b - y) ** 2).mean()

    args = jnp.full(3, 0.5), 1.0, *make_batch()
    _, split = jit(value_and_grad(line, (0, 1), batch_argnums=(2, 3), **cut))(*args)
    _, whole = jax.value_and_grad(line, (0, 1))(*args)
    assert_same(split, whole)
    assert [leaf.weak_type for leaf in split] == [leaf.weak_type for leaf in whole] == [True, True]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("fun", [lambda p, y: y.mean(), lambda p, y: Mean(y.sum(), len(y))], ids=["scalar", "Mean"])
def test_nothing_to_differentiate(fun, cut):
    _, y = make_batch()
    assert_same(value_and_grad(fun, **cut)({}, y), (y.mean(), {}))


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("argnums", [0, 1, -4, np.int64(1), (0, 1), (1,), [1, 0]], ids=str)
def test_argnums_of_every_form(argnums, cut):
    def loss_fn(w, b, x, y):
        return ((jnp.tanh(x @ w["w"]) * b - y[:, None]) ** 2).mean()

    w, b = make_params()["in"], jnp.arange(1.0, 9.0)
    del w["b"]
    batch = make_batch()
    forms = tuple(argnums) if isinstance(argnums, list) else argnums
    split = value_and_grad(loss_fn, argnums, batch_argnums=(2, 3), **cut)(w, b, *batch)
    assert_same(split, jax.value_and_grad(loss_fn, forms)(w, b, *batch))


def test_one_piece_is_jax_to_the_bit():
    params, batch = make_params(), make_batch()
    split, whole = (
        value_and_grad(loss_fn, micro_batch_size=64)(params, *batch),
        jax.value_and_grad(loss_fn)(params, *batch),
    )
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), split, whole)))


def test_has_aux_returns_jaxs_shapes():
    def with_aux(params, x, y):
        losses = squares(params, x, y)
        return losses.mean(), {"losses": losses, "largest": losses.sum()}

    params, batch = make_params(), make_batch()
    (loss, aux), grads = value_and_grad(with_aux, has_aux=True, micro_batch_size=4)(params, *batch)
    (whole_loss, whole_aux), whole = jax.value_and_grad(with_aux, has_aux=True)(params, *batch)
    assert_same(((loss, aux["losses"]), grads), ((whole_loss, whole_aux["losses"]), whole))
    assert_same_types(aux, whole_aux)
    gradients, aux = grad(with_aux, has_aux=True, micro_batch_size=4)(params, *batch)
    assert_same((gradients, aux["losses"]), (whole, whole_aux["losses"]))


def test_grad_returns_gradients_only():
    params, batch = make_params(), make_batch()
    assert_same(grad(loss_fn, micro_batch_size=4)(params, *batch), jax.grad(loss_fn)(params, *batch))


def test_terms_come_by_name():
    def terms(params, x, y):
        return {"fit": Mean.of(squares(params, x, y)), "size": 0.1 * Sum((predict(params, x) ** 2).sum())}

    params, (x, y) = make_params(), make_batch()
    for cut in CUTS:
        (loss, terms_), _ = value_and_grad(terms, return_terms=True, **cut)(params, x, y)
        assert np.isclose(terms_["fit"], loss_fn(params, x, y), rtol=1e-12)
        assert np.isclose(terms_["size"], 0.1 * (predict(params, x) ** 2).sum(), rtol=1e-12)
        assert np.isclose(loss, terms_["fit"] + terms_["size"], rtol=1e-12)
        ((_, only), _) = value_and_grad(loss_fn, return_terms=True, **cut)(params, x, y)
        assert only.keys() == {"loss"}


class Row(NamedTuple):
    x: jax.Array
    y: jax.Array


def test_arguments_by_name_are_cut_where_they_are_named():
    params, (x, y) = make_params(), make_batch()
    whole = jax.value_and_grad(loss_fn)(params, x, y)
    assert_same(value_and_grad(loss_fn, batch_argnames=("y",), micro_batch_size=4)(params, x, y=y), whole)
    assert_same(value_and_grad(loss_fn, batch_argnames="y", micro_batch_size=4)(params, x, y=y), whole)

    def of_row(params, *, scale, row):
        return scale * loss_fn(params, row.x, row.y)

    split = value_and_grad(of_row, batch_argnums=(), batch_argnames=["row"], micro_batch_size=4)
    assert_same(split(params, scale=1.0, row=Row(x, y)), whole)


def test_what_has_no_rows_goes_whole_to_each_piece():
    def scaled(params, batch, scale, name):
        assert name == "anything"
        return loss_fn(params, batch["x"], batch["y"]) * scale * batch["factor"]

    params, (x, y) = make_params(), make_batch()
    split = value_and_grad(scaled, micro_batch_size=4)
    batch = {"x": x, "y": np.asarray(y), "factor": 3.0}
    assert_same(
        split(params, batch, jnp.asarray(2.0), "anything"), jax.value_and_grad(lambda p: 6 * loss_fn(p, x, y))(params)
    )


def test_batch_argnums_keep_other_arrays_whole():
    def with_table(params, table, x, y):
        return squares(params, x + table.sum(0), y).mean()

    params, (x, y), table = make_params(), make_batch(), jnp.ones((2, 3))
    split = value_and_grad(with_table, batch_argnums=(2, 3), micro_batch_size=4)
    assert_same(split(params, table, x, y), jax.value_and_grad(with_table)(params, table, x, y))


def test_it_keeps_the_name_of_the_function():
    assert value_and_grad(loss_fn).__name__ == "loss_fn"
    assert grad(loss_fn).__name__ == "loss_fn"


@pytest.mark.parametrize("micro_batch_size", [4, 5])
def test_under_vmap(micro_batch_size):
    """Several models at once, on data of their own."""
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), make_params(0), make_params(1))
    x, y = (jnp.stack(leaves) for leaves in zip(make_batch(seed=1), make_batch(seed=2), strict=True))
    split = jax.jit(jax.vmap(value_and_grad(loss_fn, micro_batch_size=micro_batch_size)))(params, x, y)
    assert_same(split, jax.vmap(jax.value_and_grad(loss_fn))(params, x, y))


@pytest.mark.parametrize(
    "loss", [loss_fn, lambda p, x, y: Mean(squares(p, x, y).sum(), len(y))], ids=["scalar", "Mean"]
)
def test_it_can_be_differentiated_again(loss):
    params, (x, y) = make_params(), make_batch()

    def norm_of(value_and_grad, scale):
        _, grads = value_and_grad(params, x * scale, y)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads))

    split = jax.grad(lambda s: norm_of(value_and_grad(loss, micro_batch_size=4), s))(1.1)
    whole = jax.grad(lambda s: norm_of(jax.value_and_grad(loss_fn), s))(1.1)
    assert np.isclose(split, whole, rtol=1e-12)


def test_it_can_be_differentiated_through_the_weights_of_rows():
    """A count that depends on what is differentiated outside is no mistake."""
    params, (x, y) = make_params(), make_batch()

    def of_weights(weights):
        def weighted(params, x, y, weights):
            return Mean((squares(params, x, y) * weights).sum(), weights.sum())

        return value_and_grad(weighted, micro_batch_size=4)(params, x, y, weights)[0]

    def plainly(weights):
        return (squares(params, x, y) * weights).sum() / weights.sum()

    weights = jnp.arange(1.0, 11.0)
    assert_same({"w": jax.grad(of_weights)(weights)}, {"w": jax.grad(plainly)(weights)})


def test_inside_checkpoint_and_with_checkpoint_inside():
    params, batch = make_params(), make_batch()
    split = value_and_grad(jax.checkpoint(loss_fn), micro_batch_size=4)
    assert_same(jax.jit(split)(params, *batch), jax.value_and_grad(loss_fn)(params, *batch))


def test_donated_parameters():
    params, batch = make_params(), make_batch()
    whole = jax.value_and_grad(loss_fn)(params, *batch)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params, x, y):
        loss, grads = value_and_grad(loss_fn, micro_batch_size=4)(params, x, y)
        return loss, grads, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    before = make_params()
    loss, grads, after = step(params, *batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert_same((loss, grads), whole)
    assert_same(after, jax.tree.map(lambda p, g: p - 0.1 * g, before, whole[1]))


def test_complex_parameters():
    def loss_fn(w, x):
        return (jnp.abs(x @ w) ** 2).mean()

    w, (x, _) = jnp.asarray([1 + 2j, 0.5j, -1]), make_batch()
    assert_same(value_and_grad(loss_fn, micro_batch_size=4)(w, x), jax.value_and_grad(loss_fn)(w, x))


def test_a_closure_over_changing_values_is_not_frozen():
    scale = 1.0

    def scaled(params, x, y):
        return scale * loss_fn(params, x, y)

    params, batch = make_params(), make_batch()
    split = value_and_grad(scaled, micro_batch_size=4)
    once = split(params, *batch)[0]
    scale = 3.0
    assert np.isclose(split(params, *batch)[0], 3 * once, rtol=1e-12)


def test_rows_may_be_regrouped_but_none_is_lost():
    """Every row is in exactly one piece."""
    seen = []

    def spy(params, x, y):
        jax.debug.callback(lambda ids: seen.extend(ids.tolist()), y)
        return (params * y).mean()

    for rows, size in [(10, 4), (10, 5), (7, 1), (6, 6)]:
        seen.clear()
        value_and_grad(spy, micro_batch_size=size)(jnp.ones(()), jnp.ones((rows, 1)), jnp.arange(float(rows)))
        jax.effects_barrier()
        assert sorted(seen) == list(range(rows))
