"""The whole batch's gradient in JAX.

>>> import jax
>>> from jax import numpy as jnp
>>> from wholebatch.jax import value_and_grad
>>> loss_fn = lambda params, x, y: jnp.mean((x @ params - y) ** 2)
>>> step = jax.jit(value_and_grad(loss_fn, micro_batch_size=16))
>>> loss, grads = step(jnp.ones(3), jnp.ones((50, 3)), jnp.zeros(50))
"""

import importlib
from typing import Any

from .._budget import Plan
from .._comparison import Comparison
from .._report import Report
from . import _pytree
from ._check import check
from ._collectives import Collectives, collectives
from ._compare import compare_gradients
from ._multi_steps import MultiSteps, multi_steps
from ._plan import plan
from ._value_and_grad import grad, value_and_grad

__all__ = [
    "Collectives",
    "Comparison",
    "MultiSteps",
    "Plan",
    "Report",
    "check",
    "collectives",
    "compare_gradients",
    "grad",
    "multi_steps",
    "nnx",
    "plan",
    "value_and_grad",
]

_pytree.register()


def __getattr__(name: str) -> Any:
    """Flax is imported by those who use it."""
    if name == "nnx":
        return importlib.import_module(".nnx", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
