"""`check` says of each loss why its split is not exact, and of sound ones nothing."""

import itertools
import random

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import numpy as jnp

from wholebatch import Mean, Sum
from wholebatch.jax import check

ROWS, LENGTH, WIDTH = 12, 5, 3
DRAW = np.random.default_rng(0)
X, Y = jnp.asarray(DRAW.normal(size=(ROWS, WIDTH)), jnp.float32), jnp.asarray(DRAW.normal(size=ROWS), jnp.float32)
W = jnp.asarray(DRAW.normal(size=WIDTH), jnp.float32)
SQUARE = jnp.asarray(DRAW.normal(size=(WIDTH, WIDTH)), jnp.float32)
SERIES = jnp.asarray(DRAW.normal(size=(8, ROWS, WIDTH)), jnp.float32)
MASK = jnp.asarray(np.arange(LENGTH) < DRAW.integers(1, LENGTH + 1, size=(ROWS, 1)))
TOKENS = jnp.asarray(DRAW.normal(size=(ROWS, LENGTH, WIDTH)), jnp.float32)
KEY = jax.random.key(0)


def squares(w, x, y):
    return (jnp.tanh(x @ w) - y) ** 2


def mean(w, x, y):
    return squares(w, x, y).mean()


def masked(w, x, mask):
    return Mean.of(jnp.tanh(x @ w) ** 2, where=mask)


def noise(key, x):
    return x + jax.random.normal(key, x.shape, x.dtype)


def in_time(w, series):
    def step(hidden, x):
        hidden = jnp.tanh(x @ SQUARE.astype(x.dtype) + hidden * w)
        return hidden, hidden

    return (jax.lax.scan(step, jnp.zeros(series.shape[1:], series.dtype), series)[1] ** 2).mean()


class Counter:
    def __init__(self):
        self.calls = itertools.count(1)

    def __call__(self, w, x, y):
        return mean(w, x, y) * next(self.calls)


CASES = {
    # sound
    "a mean over rows": (None, mean, (X, Y)),
    "a ratio": (None, masked, (TOKENS, MASK)),
    "several terms": (
        None,
        lambda w, x, y: {
            "a": Mean.of(squares(w, x, y), where=y > 0),
            "b": 0.1 * squares(w, x, y).mean(),
            "c": Sum(squares(w, x, y).sum()),
        },
        (X, Y),
    ),
    "a penalty on weights": (None, lambda w, x, y: mean(w, x, y) + (w**2).sum(), (X, Y)),
    "two rows": (None, mean, (X[:2], Y[:2])),
    "a projection that is drawn once": (
        None,
        lambda w, x, y: mean(w, x @ jax.random.normal(KEY, (3, 3), x.dtype), y),
        (X, Y),
    ),
    "bfloat16": ("rounding", lambda w, x, y: squares(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16), y).mean(), (X, Y)),
    # means of means
    "a masked mean as a scalar": ("mean-of-means", lambda w, x, m: masked(w, x, m).value, (TOKENS, MASK)),
    "weights": ("mean-of-means", lambda w, x, y: (squares(w, x, y) * y**2).sum() / (y**2).sum(), (X, Y)),
    "a mean over one": ("mean-of-means", lambda w, x, y: Mean(mean(w, x, y), 1), (X, Y)),
    "two masked means in one": (
        "mean-of-means",
        lambda w, x, m: masked(w, x, m).value + 0.5 * masked(w, x[:, ::-1], x[:, :, 0] > 0).value,
        (TOKENS, MASK),
    ),
    # sums
    "a sum": ("sum-as-mean", lambda w, x, y: squares(w, x, y).sum(), (X, Y)),
    "a sum over a fixed number": ("sum-as-mean", lambda w, x, y: squares(w, x, y).sum() / 64, (X, Y)),
    # means as totals
    "a mean over the rows": ("mean-as-total", lambda w, x, y: Mean(mean(w, x, y), len(y)), (X, Y)),
    "a mean as a Sum": ("mean-as-total", lambda w, x, y: Sum(mean(w, x, y)), (X, Y)),
    # randomness
    "noise from a key that is closed over": ("randomness", lambda w, x, y: mean(w, noise(KEY, x), y), (X, Y)),
    "Python's random numbers": ("randomness", lambda w, x, y: mean(w, x, y) * random.random(), (X, Y)),
    "a generator of NumPy's of its own": (
        "randomness",
        lambda w, x, y, draw=DRAW: mean(w, x, y) * draw.random(),
        (X, Y),
    ),
    "noise of NumPy's for each row": (
        "randomness",
        lambda w, x, y: mean(w, x + np.random.normal(size=x.shape).astype(x.dtype), y),
        (X, Y),
    ),
    # rows that see each other
    "in-batch negatives": (
        "coupled-rows",
        lambda w, x: optax.softmax_cross_entropy_with_integer_labels(
            x @ w[:, None] * (x @ w), jnp.arange(len(x))
        ).mean(),
        (X,),
    ),
    "rows less their mean": ("coupled-rows", lambda w, x, y: mean(w, x - x.mean(0), y), (X, Y)),
    "sorting": ("coupled-rows", lambda w, x, y: ((jnp.sort(x @ w) - jnp.sort(y)) ** 2).mean(), (X, Y)),
    # the wrong axis
    "time before rows": ("wrong-axis", in_time, (SERIES,)),
    "a transposed input": ("wrong-axis", lambda w, x: jnp.tanh(x.T @ w).mean(), (X.T,)),
    # state
    "a Python counter": ("state", Counter(), (X, Y)),
}


@pytest.mark.parametrize(("cause", "fun", "batch"), CASES.values(), ids=CASES)
def test_the_cause_is_told(cause, fun, batch):
    report = check(fun, W, *batch)
    assert report.cause == cause
    assert report.exact == (cause in (None, "rounding"))


def test_generators_are_as_before():
    own = np.random.default_rng(0)
    before = own.bit_generator.state, random.getstate(), repr(np.random.get_state())
    check(lambda w, x, y: mean(w, x, y) * own.random() * random.random() * np.random.rand(), W, X, Y)
    assert (own.bit_generator.state, random.getstate(), repr(np.random.get_state())) == before


@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_randomness_by_key_is_told_and_what_is_left_without_it(key):
    report = check(lambda w, k, x, y: mean(w, noise(k, x), y), W, key, X, Y, rng_argnums=1)
    assert not report.exact
    assert report.cause == "randomness"
    assert report.exact_without_randomness
    assert "with the same draw for every row the split is exact" in str(report)


def test_more_than_randomness_is_told_too():
    report = check(lambda w, k, x, y: squares(w, noise(k, x), y).sum(), W, KEY, X, Y, rng_argnums=1)
    assert set(report.causes) >= {"sum-as-mean"}
    assert not report.exact


class Net(nnx.Module):
    def __init__(self, rngs, *, norm=False, dropout=0.0, counts=False):
        self.body = nnx.Linear(WIDTH, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros(())) if counts else None

    def __call__(self, x):
        x = self.body(x)
        x = self.dropout(x if self.norm is None else self.norm(x))
        if self.calls is not None:
            self.calls[...] = self.calls[...] + 1
            x = x * self.calls[...].astype(x.dtype)
        return x.sum(1)


@pytest.mark.parametrize(
    ("cause", "options"),
    [
        (None, {}),
        ("batch-statistics", {"norm": True}),
        ("randomness", {"dropout": 0.5}),
        ("state", {"counts": True}),
    ],
    ids=["sound", "BatchNorm", "dropout", "a counter"],
)
def test_what_modules_do_is_told(cause, options):
    model = Net(nnx.Rngs(0), **options)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))
    report = check(lambda m, x, y: jnp.mean((m(x) - y) ** 2), model, X, Y)
    assert report.cause == cause
    assert report.exact == (cause is None)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey)))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), before, after)))
    assert (model.norm is None) or not model.norm.use_running_average, "the mode is as it was"


def test_linens_batch_norm_is_told_by_what_it_hands_out():
    norm = linen.BatchNorm(use_running_average=False)
    variables = norm.init(KEY, X)

    def fun(params, x, y):
        out, updates = norm.apply({**variables, "params": params}, x, mutable=["batch_stats"])
        return ((out.sum(1) - y) ** 2).mean(), updates

    assert check(fun, variables["params"], X, Y, has_aux=True).cause == "batch-statistics"
