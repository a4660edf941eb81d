"""`Mean` and `Sum` as pytrees, so that they pass through `jit`, `scan` and `tree.map`."""

import jax

from .._mean import Mean, Sum


def register() -> None:
    """Once, when the front end is imported."""
    jax.tree_util.register_dataclass(Mean, data_fields=["total", "count"], meta_fields=[])
    jax.tree_util.register_dataclass(Sum, data_fields=["total"], meta_fields=[])
