"""Random keys: every piece gets its own, on every device, and the only piece of a batch the key as it is."""

import jax
from jax import Array
from jax import numpy as jnp

from .._errors import OptionTypeError
from ._tree import Tree


def split_keys(keys: Tree, pieces: int) -> Tree:
    """As many keys from each, along a new leading axis; one is the key as it is.

    Args:
        keys: a tree of keys, typed or raw.
        pieces: how many keys each becomes.
    """
    if pieces == 1:
        return jax.tree.map(lambda key: _require_key(key)[None], keys)
    return jax.tree.map(lambda key: jax.random.split(_require_key(key), pieces), keys)


def fold_in_each(keys: Array, number: Array) -> Array:
    """An array of keys, typed or raw, each with a number folded in."""
    shape = keys.shape if _is_typed(keys) else keys.shape[:-1]
    flat = keys.reshape(-1, *keys.shape[len(shape) :])
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(flat).reshape(keys.shape)


def _require_key(key: Array) -> Array:
    typed = isinstance(key, Array) and _is_typed(key) and key.ndim == 0
    raw = hasattr(key, "dtype") and key.dtype == jnp.uint32 and key.ndim == 1
    if not (typed or raw):
        got = f"{key.dtype} of shape {key.shape}" if hasattr(key, "dtype") else type(key).__name__
        raise OptionTypeError(f"rng_argnums names an argument that is not a random key: got {got}")
    return key


def _is_typed(key: Array) -> bool:
    return jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
