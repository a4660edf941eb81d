"""Trees of arrays, and what counts as an array."""

import numbers
from typing import Any

import numpy as np
from jax import Array

Tree = Any
"""Any pytree."""


def is_array_like(leaf: Any) -> bool:
    """Whether JAX takes it for an array: arrays, tracers, NumPy's arrays and scalars, numbers."""
    return isinstance(leaf, Array | np.ndarray | np.generic | numbers.Number)
