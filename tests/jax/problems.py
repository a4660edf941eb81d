"""A small network in plain JAX, its batch, and the comparison with JAX's own gradient."""

import jax
import numpy as np
from jax import numpy as jnp

from reference import EXACT, assert_exact


def make_params(seed=0, dtype=float):
    draw = np.random.default_rng(seed).normal
    return {
        "in": {"w": jnp.asarray(draw(size=(3, 8)), dtype), "b": jnp.zeros(8, dtype)},
        "out": jnp.asarray(draw(size=8), dtype),
    }


def make_batch(rows=10, seed=1, dtype=float):
    random = np.random.default_rng(seed)
    return jnp.asarray(random.normal(size=(rows, 3)), dtype), jnp.asarray(random.normal(size=rows), dtype)


def predict(params, x):
    return jnp.tanh(x @ params["in"]["w"] + params["in"]["b"]) @ params["out"]


def squares(params, x, y):
    return (predict(params, x) - y) ** 2


def loss_fn(params, x, y):
    return squares(params, x, y).mean()


def by_name(tree):
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_same(split, whole, tolerance=EXACT):
    """The same tree with the same entries."""
    assert jax.tree.structure(split) == jax.tree.structure(whole)
    assert_exact(by_name(split), by_name(whole), tolerance)


def assert_same_types(actual, expected):
    """The same tree, shapes and dtypes."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
