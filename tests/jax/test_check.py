"""`check` says whether a split is exact, and leaves everything as it was."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp
from problems import loss_fn, make_batch, make_params, squares

from wholebatch import Mean, Sum
from wholebatch.jax import check

SOUND = {
    "scalar": loss_fn,
    "masked mean": lambda p, x, y: Mean.of(squares(p, x, y), where=y > 0),
    "sum": lambda p, x, y: Sum(squares(p, x, y).sum()),
    "terms": lambda p, x, y: {"a": Mean.of(squares(p, x, y), where=y > 0), "b": 0.1 * Mean.of(squares(p, x, y))},
    "a normalised row": lambda p, x, y: loss_fn(p, x / jnp.linalg.norm(x, axis=1, keepdims=True), y),
}

BROKEN = {
    "a masked mean as a scalar": lambda p, x, y: Mean.of(squares(p, x, y), where=y > 0).value,
    "a sum as a scalar": lambda p, x, y: squares(p, x, y).sum(),
    "a mean as a total": lambda p, x, y: Mean(squares(p, x, y).mean(), len(y)),
    "rows normalised over the batch": lambda p, x, y: loss_fn(p, (x - x.mean(0)) / x.std(0), y),
}


@pytest.mark.parametrize("fun", SOUND.values(), ids=SOUND)
def test_sound_losses_are_exact(fun):
    report = check(fun, make_params(), *make_batch(50))
    assert report.exact
    assert report.dtype == "float64"
    assert report.error <= 1e-12
    assert set(report.cuts) == {2, 3, 7}


@pytest.mark.parametrize("fun", BROKEN.values(), ids=BROKEN)
def test_broken_losses_are_not(fun):
    report = check(fun, make_params(), *make_batch(50))
    assert not report.exact
    assert report.error > 1e-6
    assert "NOT exact" in str(report)
    assert "worst parameters" in str(report)


def test_parameters_are_named_worst_first():
    report = check(BROKEN["a sum as a scalar"], make_params(), *make_batch())
    assert set(report.parameters) == {"['in']['w']", "['in']['b']", "['out']"}
    assert list(report.parameters.values()) == sorted(report.parameters.values(), reverse=True)


def test_float32_is_widened_and_nothing_else_changes():
    with jax.enable_x64(False):
        params, batch = make_params(dtype=jnp.float32), make_batch(dtype=jnp.float32)
        report = check(loss_fn, params, *batch)
        assert report.exact
        assert report.dtype == "float64"
        assert jnp.asarray(1.0).dtype == jnp.float32


def test_what_computes_in_less_is_judged_by_that():
    def fun(params, x, y):
        return squares(params, x, y).astype(jnp.float32).mean()

    report = check(fun, make_params(), *make_batch())
    assert report.exact
    assert report.dtype == "float32"
    assert report.tolerance > 1e-12


def test_a_metric_of_little_precision_does_not_excuse_a_wrong_loss():
    def fun(params, x, y):
        losses = squares(params, x, y)
        return losses.sum() * 1e-3 + losses.mean(), losses.astype(jnp.bfloat16).mean()

    report = check(fun, make_params(), *make_batch(), has_aux=True)
    assert not report.exact
    assert report.dtype == "float64"


def test_a_function_that_insists_on_its_own_precision():
    def fun(params, x, y):
        assert x.dtype == jnp.float32
        return loss_fn(params, x, y)

    with jax.enable_x64(False):
        report = check(fun, make_params(dtype=jnp.float32), *make_batch(dtype=jnp.float32))
    assert report.exact
    assert report.dtype == "float32"


def test_a_split_that_fails_is_not_exact():
    def fun(params, x, y):
        if len(y) < 3:
            raise RuntimeError("too few rows")
        return loss_fn(params, x, y)

    report = check(fun, make_params(), *make_batch())
    assert not report.exact
    assert "RuntimeError: too few rows" in report.failure


def test_a_size_of_ones_own_and_keys():
    def fun(params, key, x, y):
        return loss_fn(params, x, y) + 0 * jax.random.uniform(key)

    report = check(fun, make_params(), jax.random.key(0), *make_batch(50), rng_argnums=1, micro_batch_size=4)
    assert report.exact
    assert set(report.cuts) == {2, 3, 9}
    assert report.rows == 9


def test_with_aux():
    assert check(lambda p, x, y: (loss_fn(p, x, y), {"y": y}), make_params(), *make_batch(), has_aux=True).exact


class Net(nnx.Module):
    def __init__(self, norm, rngs):
        self.body = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x):
        x = self.body(x)
        return self.dropout(x if self.norm is None else self.norm(x)).sum(1)


@pytest.mark.parametrize("norm", [False, True])
def test_modules_are_judged_and_left_alone(norm):
    model = Net(norm, nnx.Rngs(0))
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState))))
    report = check(lambda m, x, y: jnp.mean((m(x) - y) ** 2), model, *make_batch())
    assert report.exact is not norm
    after = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), before, after)))


def test_nothing_to_compare_is_an_error():
    with pytest.raises(ValueError, match="zero everywhere"):
        check(lambda p, x, y: 0 * loss_fn(p, x, y), make_params(), *make_batch())
