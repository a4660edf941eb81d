"""A small network in Flax NNX, with dropout and BatchNorm where they are asked for."""

import optax
from flax import nnx
from jax import numpy as jnp


class Net(nnx.Module):
    def __init__(self, *, rate=0.0, norm=False, momentum=0.9, rngs):
        self.hidden = nnx.Linear(3, 8, param_dtype=float, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=momentum, param_dtype=float, rngs=rngs) if norm else None
        if norm:  # the layer itself makes them float32
            self.norm.mean, self.norm.var = nnx.BatchStat(jnp.zeros(8)), nnx.BatchStat(jnp.ones(8))
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(8, 1, param_dtype=float, rngs=rngs)

    def __call__(self, x):
        x = self.hidden(x)
        if self.norm is not None:
            x = self.norm(x)
        return self.head(self.dropout(jnp.tanh(x)))[:, 0]


def make_net(**options):
    return Net(rngs=nnx.Rngs(0), **options)


def loss_fn(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def plain(state):
    return nnx.to_pure_dict(state)


def train(value_and_grad, batches):
    """The losses of a step for each batch, and the parameters after them."""
    model = make_net()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = value_and_grad(model, x, y)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer, *batch) for batch in batches]
    return jnp.stack(losses), plain(nnx.state(model, nnx.Param))
