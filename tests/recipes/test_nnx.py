"""NNX: the update is that of the full batch, computed here by hand in float64."""

import numpy as np
import pytest
from flax import nnx as flax_nnx

from reference import assert_exact
from wholebatch import BatchError
from wholebatch.recipes import nnx

FLOAT32 = 1e-6  # a few roundings of 2^-24
LR = 0.1


def make_batch(rows, d_in=3, d_out=2):
    random = np.random.default_rng(0)
    return random.normal(size=(rows, d_in)).astype(np.float32), random.normal(size=(rows, d_out)).astype(np.float32)


def by_hand(seed, x, y, weights):
    """The squared error over all entries after one update with the gradient weighted by row."""
    model = flax_nnx.Linear(x.shape[1], y.shape[1], rngs=flax_nnx.Rngs(seed))
    kernel, bias = np.asarray(model.kernel[...], float), np.asarray(model.bias[...], float)
    x, y = x.astype(float), y.astype(float)
    slope = 2 / y.shape[1] * (weights / weights.sum())[:, None] * (x @ kernel + bias - y)
    kernel, bias = kernel - LR * x.T @ slope, bias - LR * slope.sum(0)
    return {"error": np.mean((x @ kernel + bias - y) ** 2, keepdims=True).reshape(1)}


def updated(seed, x, y, first):
    error = nnx.grad_accumulation_step(seed, x[:first], y[:first], x[first:], y[first:], LR)
    assert error.shape == (1,)
    return {"error": np.asarray(error, float)}


@pytest.mark.parametrize(("first", "rows"), [(4, 8), (1, 7)])
def test_one_update_is_that_of_the_full_batch(first, rows):
    x, y = make_batch(rows)
    assert_exact(updated(2.0, x, y, first), by_hand(2, x, y, np.ones(rows)), FLOAT32)


def test_the_mean_of_unequal_means_is_another_update():
    x, y = make_batch(7)
    wrong = by_hand(2, x, y, np.repeat([1 / 5, 1 / 2], [5, 2]))
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(updated(2.0, x, y, 5), wrong, 1e-3)


def test_targets_without_an_axis_of_outputs_are_refused():
    x, y = make_batch(4)
    with pytest.raises(BatchError) as caught:
        nnx.grad_accumulation_step(0.0, x, y[:, 0], x, y[:, 0], LR)
    assert str(caught.value) == (
        "micro-batch 1: x has shape (4, 3) and y (4,), they must have (M, D_in) and (M, D_out)"
    )
