"""Linen: the step is that of the full batch, computed here by hand in float64."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from jax import numpy as jnp

from reference import assert_exact
from wholebatch import BatchError
from wholebatch.recipes import linen

FLOAT32 = 1e-6  # a few roundings of 2^-24
LR = 0.1


def make_micro_batches(sizes, features=3):
    random = np.random.default_rng(0)
    xs = [random.normal(size=(size, features)).astype(np.float32) for size in sizes]
    return xs, [random.normal(size=size).astype(np.float32) for size in sizes]


def initial(seed, x):
    params = nn.Dense(1).init(jax.random.PRNGKey(seed), x)["params"]
    return np.asarray(params["kernel"], float)[:, 0], float(params["bias"][0])


def error_after_a_step(kernel, bias, x, y, weights):
    """By hand: the squared error over all rows after one step with the gradient weighted by row."""
    weights = weights / weights.sum()
    slope = 2 * weights * (x @ kernel + bias - y)
    kernel, bias = kernel - LR * x.T @ slope, bias - LR * slope.sum()
    return {"error": np.mean((x @ kernel + bias - y) ** 2, keepdims=True)}


def by_hand(seed, xs, ys, weigh=lambda size: np.ones(size)):
    x, y = np.concatenate(xs).astype(float), np.concatenate(ys).astype(float)
    return error_after_a_step(*initial(seed, xs[0]), x, y, np.concatenate([weigh(len(x)) for x in xs]))


def stepped(seed, xs, ys):
    error = linen.grad_accumulation_step(seed, xs, ys, LR)
    assert error.shape == (1,)
    return {"error": np.asarray(error, float)}


@pytest.mark.parametrize("sizes", [(3, 3, 3), (5,), (1, 6, 3)], ids=str)
def test_one_step_is_that_of_the_full_batch(sizes):
    xs, ys = make_micro_batches(sizes)
    if len(set(sizes)) == 1:
        xs, ys = jnp.stack(xs), jnp.stack(ys)
    assert_exact(stepped(3.0, xs, ys), by_hand(3, xs, ys), FLOAT32)


def test_the_mean_of_unequal_means_is_another_step():
    xs, ys = make_micro_batches((5, 2))
    wrong = by_hand(3, xs, ys, weigh=lambda size: np.full(size, 1 / size))
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(stepped(3.0, xs, ys), wrong, 1e-3)


def test_the_seed_is_cast_to_an_integer():
    xs, ys = make_micro_batches((2,))
    assert stepped(7.0, xs, ys) == stepped(7.9, xs, ys)
    assert stepped(7.0, xs, ys) != stepped(8.0, xs, ys)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (([(4, 3)], [(4,), (4,)]), "1 micro-batches of x and 2 of y: give as many of each"),
        (([(4, 3), (2, 3)], [(4,), (3,)]), "micro-batch 2: x has shape (2, 3) and y (3,), they must have (M, D) and (M,)"),
        (([(4, 3)], [(4, 1)]), "micro-batch 1: x has shape (4, 3) and y (4, 1), they must have (M, D) and (M,)"),
        (([(0, 3)], [(0,)]), "the batch is empty: its micro-batches have 0 rows"),
    ],
    ids=["fewer of one", "rows differ", "a column would be broadcast", "no rows"],
)  # fmt: skip
def test_bad_input_is_an_error_that_says_what_to_change(shapes, message):
    xs, ys = [[np.ones(shape, np.float32) for shape in one] for one in shapes]
    with pytest.raises(BatchError) as caught:
        linen.grad_accumulation_step(0.0, xs, ys, LR)
    assert str(caught.value) == message
