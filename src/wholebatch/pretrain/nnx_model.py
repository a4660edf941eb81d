"""The GPT in Flax NNX, the same as in `torch_model`, and its weights under the shared names."""

import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax import numpy as jnp

from .settings import Settings
from .weights import Weights

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16, "fp64": jnp.float64}


class Block(nnx.Module):
    """Attention and a wider layer, each added to what comes in."""

    def __init__(self, settings: Settings, dtypes: dict[str, Any], rngs: nnx.Rngs) -> None:
        width = settings.width
        self.heads = settings.heads
        self.before_attention = norm(width, rngs, dtypes)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs, **dtypes)
        self.out = nnx.Linear(width, width, rngs=rngs, **dtypes)
        self.before_mlp = norm(width, rngs, dtypes)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs, **dtypes)
        self.down = nnx.Linear(4 * width, width, rngs=rngs, **dtypes)
        self.drop = nnx.Dropout(settings.dropout)

    def __call__(self, x: Array, rngs: nnx.Rngs | None) -> Array:
        qkv = self.qkv(self.before_attention(x)).reshape(*x.shape[:-1], 3, self.heads, -1)
        q, k, v = (qkv[..., i, :, :] for i in range(3))
        mixed = attention(q, k, v).reshape(x.shape)
        x = x + self._dropped(self.out(mixed), rngs)
        wide = nnx.gelu(self.up(self.before_mlp(x)), approximate=False)
        return x + self._dropped(self.down(wide), rngs)

    def _dropped(self, x: Array, rngs: nnx.Rngs | None) -> Array:
        return self.drop(x, deterministic=rngs is None, rngs=rngs)


class GPT(nnx.Module):
    """From token ids of shape (rows, tokens) to the scores of what follows each."""

    def __init__(self, settings: Settings, vocabulary: int) -> None:
        rngs = nnx.Rngs(0)  # the weights are set afterwards
        param_dtype = jnp.float64 if settings.precision == "fp64" else jnp.float32
        dtypes = {"dtype": DTYPES[settings.precision], "param_dtype": param_dtype}
        self.tokens = nnx.Embed(vocabulary, settings.width, rngs=rngs, **dtypes)
        self.positions = nnx.Embed(settings.seq_len, settings.width, rngs=rngs, **dtypes)
        self.drop = nnx.Dropout(settings.dropout)
        self.blocks = nnx.List([Block(settings, dtypes, rngs) for _ in range(settings.layers)])
        self.norm = norm(settings.width, rngs, dtypes)

    def __call__(self, ids: Array, rngs: nnx.Rngs | None = None) -> Array:
        x = self.tokens(ids) + self.positions(jnp.arange(ids.shape[1]))
        x = self.drop(x, deterministic=rngs is None, rngs=rngs)
        for block in self.blocks:
            x = block(x, rngs)
        return self.tokens.attend(self.norm(x))


def attention(q: Array, k: Array, v: Array) -> Array:
    """Each token looks back. JAX's own takes float64 to float32 on the way."""
    scores = jnp.einsum("rqhd,rkhd->rhqk", q, k) / math.sqrt(q.shape[-1])
    back = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    weights = jax.nn.softmax(jnp.where(back, wide, -jnp.inf)).astype(v.dtype)
    return jnp.einsum("rhqk,rkhd->rqhd", weights, v)


def norm(width: int, rngs: nnx.Rngs, dtypes: dict[str, Any]) -> nnx.LayerNorm:
    """As PyTorch computes it."""
    return nnx.LayerNorm(width, epsilon=1e-5, use_fast_variance=False, rngs=rngs, **dtypes)


def to_shared(tree: Any) -> Weights:
    """A tree like the model's parameters, as arrays under the shared names."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {_name(path): _turned(path, np.asarray(leaf)) for path, leaf in leaves}


def from_shared(weights: Weights, like: Any) -> Any:
    """A tree like the model's parameters, with arrays from under the shared names."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(_turned(path, weights[_name(path)]), leaf.dtype), like
    )


def _name(path: Any) -> str:
    *where, what = [str(getattr(key, "key", getattr(key, "name", key))) for key in path if not _is_value(key)]
    return ".".join([*where, {"kernel": "weight", "embedding": "weight", "scale": "weight"}.get(what, what)])


def _is_value(key: Any) -> bool:
    """The last step of a path, from a variable to its array."""
    return getattr(key, "name", None) == "value"


def _turned(path: Any, array: Any) -> Any:
    """Linear layers are (inputs, outputs) here and (outputs, inputs) there."""
    return array.T if "kernel" in jax.tree_util.keystr(path) else array
