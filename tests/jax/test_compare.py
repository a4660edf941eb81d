"""`compare_gradients` judges loops in JAX."""

import jax
import pytest
from jax import numpy as jnp
from problems import loss_fn, make_batch, make_params

from wholebatch import OptionError
from wholebatch.jax import compare_gradients, grad


def test_the_loops_that_people_write():
    params, (x, y) = make_params(), make_batch()
    whole = jax.grad(loss_fn)(params, x, y)
    assert compare_gradients(grad(loss_fn, micro_batch_size=4)(params, x, y), whole).equal
    pieces = [jax.grad(loss_fn)(params, x[rows], y[rows]) for rows in (slice(0, 5), slice(5, 10))]
    summed = jax.tree.map(lambda *leaves: sum(leaves), *pieces)
    found = compare_gradients(summed, whole, num_micro_batches=2)
    assert found.ratio == pytest.approx(2)
    assert "a sum over 2 micro-batches" in found.explanation
    assert set(found.ratios) == {"['in']['w']", "['in']['b']", "['out']"}


def test_names_numbers_and_what_cannot_be_compared():
    one = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([1j])}
    assert set(compare_gradients(one, one, names=["x", "y"]).ratios) == {"x", "y"}
    assert compare_gradients(one["a"], one["a"].astype(jnp.float32)).equal
    assert compare_gradients(one["a"], one["a"]).ratios == {"params": pytest.approx(1)}
    with pytest.raises(OptionError, match="there are 2 gradients, but 1 names were given"):
        compare_gradients(one, one, names=["x"])
    with pytest.raises(OptionError, match="hold different gradients"):
        compare_gradients(one, {"a": one["a"]})
    with pytest.raises(OptionError, match=r"params has shape \(2,\) in a and \(3,\) in b"):
        compare_gradients(jnp.ones(2), jnp.ones(3))
