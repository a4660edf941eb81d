"""BatchNorm under splitting: pieces are normalised by their own statistics, the running ones follow the whole batch.

Each piece starts from the running statistics r of before and leaves r_k = momentum · r + (1 - momentum) · (m_k, v_k).
With w_k = rows of the piece / rows of the batch, mean m_k and (biased) variance v_k of the piece, the whole leaves

    r_mean = Σ w_k r_mean_k
    r_var  = Σ w_k r_var_k + Σ w_k (r_mean_k - r_mean)² / (1 - momentum)

as the variance of the whole is the mean of the variances and the variance of the means.
"""

import warnings
from typing import Any, NoReturn

from flax import nnx
from jax import Array
from jax import numpy as jnp

from .._errors import BatchNormError

Path = tuple[Any, ...]
State = nnx.State[Any, Any]


class BatchNorms:
    """The BatchNorm layers of some modules."""

    def __init__(self, nodes: Any) -> None:
        self._momenta: dict[Path, float] = {
            path: node.momentum for path, node in nnx.iter_graph(nodes) if isinstance(node, nnx.BatchNorm)
        }

    def holds(self, path: Path, variable: Any) -> bool:
        """Whether a variable is a running statistic of one of them; a filter."""
        return path[:-1] in self._momenta and path[-1] in ("mean", "var")

    def pooled(self, pieces: State, sizes: list[int]) -> State:
        """What the whole batch leaves, from what each piece left (along the leading axis), if it left any."""
        left = dict(nnx.to_flat_state(pieces))
        whole: dict[Path, Any] = {}
        for path, momentum in self._momenta.items() if left else ():
            mean_path, var_path = (*path, "mean"), (*path, "var")
            mean = _weighted(left[mean_path].get_raw_value(), sizes)
            apart = jnp.square(left[mean_path].get_raw_value() - mean)
            between = _weighted(apart, sizes) / (1 - momentum) if momentum < 1 else 0
            var = _weighted(left[var_path].get_raw_value(), sizes) + between
            whole[mean_path], whole[var_path] = left[mean_path].replace(mean), left[var_path].replace(var)
        return nnx.from_flat_state(whole)


def refuse(written: list[str]) -> NoReturn:
    """Name the layers, and the ways out."""
    raise BatchNormError(
        f"{_layers(written)}: in training mode with statistics of the batch, which its pieces do not have. Ways out: "
        'batch_norm="micro" accepts normalisation per piece and keeps the running statistics those of the batch; '
        "model.eval() freezes them; GroupNorm and LayerNorm see one row at a time"
    )


def warn(written: list[str]) -> None:
    """What "micro" accepts, said once."""
    warnings.warn(
        f"{_layers(written)}: normalised by the statistics of each piece, so the gradient is not that of the whole "
        "batch; the running statistics are, over all pieces and devices",
        UserWarning,
        stacklevel=2,
    )


def _layers(written: list[str]) -> str:
    return ", ".join(sorted({path.rpartition(".")[0] or "the model" for path in written}))


def _weighted(pieces: Array, sizes: list[int]) -> Array:
    shares = jnp.asarray([size / sum(sizes) for size in sizes], pieces.dtype)
    return jnp.tensordot(shares, pieces, axes=1)
