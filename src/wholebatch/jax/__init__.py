"""The whole batch's gradient in JAX.

>>> import jax
>>> from jax import numpy as jnp
>>> from wholebatch.jax import value_and_grad
>>> loss_fn = lambda params, x, y: jnp.mean((x @ params - y) ** 2)
>>> step = jax.jit(value_and_grad(loss_fn, micro_batch_size=16))
>>> loss, grads = step(jnp.ones(3), jnp.ones((50, 3)), jnp.zeros(50))
"""

from . import _pytree
from ._value_and_grad import grad, value_and_grad

__all__ = ["grad", "value_and_grad"]

_pytree.register()
