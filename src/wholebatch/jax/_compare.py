"""Compare: the gradients of any loop with what they should be."""

from collections.abc import Sequence

import jax
import numpy as np
from jax import numpy as jnp

from .._comparison import Comparison, Hints, compare
from .._errors import OptionError
from .._report import tolerance
from ._tree import Tree


def compare_gradients(
    a: Tree,
    b: Tree,
    names: Sequence[str] | None = None,
    *,
    num_micro_batches: int | None = None,
    accumulation_steps: int | None = None,
    world_size: int | None = None,
    rows: int | None = None,
) -> Comparison:
    """What the ratios of two gradients tell about the loop that made the first.

    Args:
        a: what the loop gave, a tree of arrays.
        b: what it should be, in the same structure.
        names: of the leaves; their paths by default.
        num_micro_batches: how many pieces this batch had, if that is known; so that a reason can be named.
        accumulation_steps: how many pieces a full window has.
        world_size: the number of processes.
        rows: how many rows the batch had.

    >>> from jax import numpy as jnp
    >>> right = {"w": jnp.array([1.0, 2.0]), "b": jnp.array([3.0])}
    >>> doubled = {"w": jnp.array([2.0, 4.0]), "b": jnp.array([6.0])}
    >>> compare_gradients(doubled, right, world_size=2).explanation
    'all are 2 times what they should be: a sum over 2 processes where their mean was meant'
    """
    loop, meant = _named(a, names), _named(b, names)
    if loop.keys() != meant.keys():
        raise OptionError(f"a and b hold different gradients: {sorted(loop.keys() ^ meant.keys())[:3]} is in one only")
    eps = float(jnp.finfo(jnp.float64).eps)  # type: ignore[no-untyped-call]
    for name, one in loop.items():
        if one.shape != meant[name].shape:
            raise OptionError(f"{name} has shape {one.shape} in a and {meant[name].shape} in b")
        eps = max(eps, *(float(jnp.finfo(array.dtype).eps) for array in (one, meant[name])))  # type: ignore[no-untyped-call]
    pairs = {name: (_flat(one), _flat(meant[name])) for name, one in loop.items()}
    hints = Hints(num_micro_batches, accumulation_steps, world_size, rows)
    return compare(pairs, min(0.05, tolerance(eps, num_micro_batches or 16)), hints)


def _named(tree: Tree, names: Sequence[str] | None) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if names is not None and len(names) != len(leaves):
        raise OptionError(f"there are {len(leaves)} gradients, but {len(names)} names were given")
    paths = names if names is not None else [jax.tree_util.keystr(path) or "params" for path, _ in leaves]
    return {name: np.asarray(leaf) for name, (_, leaf) in zip(paths, leaves, strict=True)}


def _flat(array: np.ndarray) -> np.ndarray:
    flat = array.reshape(-1)
    return np.concatenate([flat.real, flat.imag]) if np.iscomplexobj(flat) else flat.astype(np.float64)
