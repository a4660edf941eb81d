"""What is trained in JAX: the GPT of `_torch_problems.py`, in plain functions."""

from typing import Any

import jax
import numpy as np
import optax
from jax import Array, lax
from jax import numpy as jnp

Batch = tuple[Array, Array]


class GPT:
    """Next tokens; the head and the embedding share their weight."""

    def __init__(
        self, vocabulary: int, width: int = 256, layers: int = 4, length: int = 64, heads: int = 4, rows: int = 16
    ) -> None:
        self.vocabulary, self.width, self.layers = vocabulary, width, layers
        self.length, self.heads, self.rows = length, heads, rows

    def params(self) -> dict[str, Any]:
        random, width = np.random.default_rng(0), self.width

        def normal(*shape: int) -> Array:
            return jnp.asarray(0.02 * random.normal(size=shape), float)

        def norm() -> dict[str, Array]:
            return {"scale": jnp.ones(width), "shift": jnp.zeros(width)}

        def linear(inputs: int, outputs: int) -> dict[str, Array]:
            return {"w": normal(inputs, outputs), "b": jnp.zeros(outputs)}

        def block() -> dict[str, Any]:
            return {
                "before_attention": norm(),
                "qkv": linear(width, 3 * width),
                "out": linear(width, width),
                "before_mlp": norm(),
                "up": linear(width, 4 * width),
                "down": linear(4 * width, width),
            }

        return {
            "tokens": normal(self.vocabulary, width),
            "positions": normal(self.length, width),
            "blocks": [block() for _ in range(self.layers)],
            "norm": norm(),
        }

    def batch(self, random: np.random.Generator) -> Batch:
        ids = random.integers(self.vocabulary, size=(self.rows, self.length + 1))
        return jnp.asarray(ids[:, :-1]), jnp.asarray(ids[:, 1:])

    def loss(self, params: Any, ids: Array, labels: Array) -> Array:
        x = params["tokens"][ids] + params["positions"]
        for block in params["blocks"]:
            x = x + _linear(block["out"], self._attention(_linear(block["qkv"], _norm(block["before_attention"], x))))
            x = x + _linear(block["down"], jax.nn.gelu(_linear(block["up"], _norm(block["before_mlp"], x))))
        logits = _norm(params["norm"], x) @ params["tokens"].T
        loss: Array = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss

    def _attention(self, qkv: Array) -> Array:
        rows, length, _ = qkv.shape
        q, k, v = jnp.moveaxis(qkv.reshape(rows, length, 3, self.heads, -1), 2, 0)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(self.width / self.heads)
        shares = jax.nn.softmax(jnp.where(np.tri(length, dtype=bool), scores, -np.inf))
        mixed: Array = jnp.einsum("bhts,bshd->bthd", shares, v).reshape(rows, length, self.width)
        return mixed


def _linear(params: Any, x: Array) -> Array:
    product: Array = x @ params["w"] + params["b"]
    return product


def _norm(params: Any, x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    normed: Array = centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * params["scale"]
    return jnp.add(normed, params["shift"])


PROBLEMS = {"gpt": GPT}
