"""The same small model and data give the same gradients in both front ends, in float64."""

import jax
import numpy as np
import torch
from jax import numpy as jnp

import wholebatch.jax
import wholebatch.torch
from reference import assert_exact
from wholebatch import Mean

ROWS, TOKENS, WIDTH, VOCABULARY = 10, 7, 6, 11


def make_weights():
    draw = np.random.default_rng(0).normal
    return {"embedding": draw(size=(VOCABULARY, WIDTH)), "hidden": draw(size=(WIDTH, WIDTH)), "bias": draw(size=WIDTH)}


def make_batch():
    random = np.random.default_rng(1)
    ids = random.integers(VOCABULARY, size=(ROWS, TOKENS))
    mask = np.arange(TOKENS) < random.integers(1, TOKENS, size=(ROWS, 1))
    return ids, mask


def in_torch():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, array in make_weights().items():
                self.register_parameter(name, torch.nn.Parameter(torch.tensor(array)))

        def forward(self, ids):
            hidden = torch.tanh(self.embedding[ids] @ self.hidden + self.bias)
            return hidden @ self.embedding.T

    model = Model()

    def loss_fn(piece):
        ids, mask = piece
        scores = model(ids[:, :-1])
        losses = torch.nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return Mean.of(losses.view_as(mask[:, 1:]), where=mask[:, 1:])

    batch = tuple(map(torch.from_numpy, make_batch()))
    result = wholebatch.torch.backward(model, loss_fn, batch, micro_batch_size=4)
    return result.loss.item(), {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


def in_jax():
    def loss_fn(weights, ids, mask):
        hidden = jnp.tanh(weights["embedding"][ids[:, :-1]] @ weights["hidden"] + weights["bias"])
        scores = jax.nn.log_softmax(hidden @ weights["embedding"].T)
        losses = -jnp.take_along_axis(scores, ids[:, 1:, None], axis=-1)[..., 0]
        return Mean.of(losses, where=mask[:, 1:])

    with jax.enable_x64(True):
        step = jax.jit(wholebatch.jax.value_and_grad(loss_fn, micro_batch_size=4))
        loss, grads = step(jax.tree.map(jnp.asarray, make_weights()), *make_batch())
        return float(loss), {name: np.asarray(grad) for name, grad in grads.items()}


def test_torch_and_jax_agree():
    loss, grads = in_torch()
    other_loss, other = in_jax()
    assert abs(loss - other_loss) <= 1e-10 * loss
    assert_exact(grads, other, tolerance=1e-10)
