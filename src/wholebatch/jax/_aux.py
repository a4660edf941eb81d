"""What a loss function reports besides, reduced over the pieces.

    sum      Σ a_k                       mean     Σ w_k a_k / Σ w_k, with the objective's counts as weights
    stack    one entry per piece         concat   entries of the rows, in the order of the batch's rows

`Mean` and `Sum` say themselves how they add up, and are reported as numbers.
"""

from collections.abc import Iterator
from typing import Any, Literal

import jax
from jax import Array
from jax import numpy as jnp

from .._errors import LossTypeError, OptionError
from .._mean import Mean, Sum
from ._cut import Cut
from ._loss import as_count, wide
from ._tree import Tree

Mode = Literal["auto", "mean", "sum", "stack", "concat"]
MODES = ("auto", "mean", "sum", "stack", "concat")


class Reduction:
    """How each node of one function's aux is reduced.

    Args:
        modes: a mode, or a tree prefix of modes.
        aux: what a piece of `rows` rows reports, as arrays or shapes.
        rows: that number of rows.
        other: what a piece of `other_rows` rows reports; None where nothing hangs on it.
        other_rows: that number of rows.
    """

    def __init__(self, modes: Tree, aux: Tree, rows: int, other: Tree | None, other_rows: int) -> None:
        self._nodes, self._tree = jax.tree.flatten(aux, is_leaf=is_ratio)
        others = self._nodes if other is None else jax.tree.leaves(other, is_leaf=is_ratio)
        self._modes = [
            mode if mode != "auto" else _mode_of(node, rows, other, other_rows)
            for mode, node, other in zip(modes_by_leaf(modes, aux), self._nodes, others, strict=True)
        ]
        self._rows = rows

    def of_piece(self, aux: Tree, weight: Array) -> tuple[list[Tree], list[Array]]:
        """What a piece adds, and what is kept of it."""
        nodes = list(zip(jax.tree.leaves(aux, is_leaf=is_ratio), self._modes, strict=True))
        added = [_addend(node, mode, weight) for node, mode in nodes if mode in ("mean", "sum")]
        return added, [node for node, mode in nodes if mode in ("stack", "concat")]

    def by_piece(self) -> Tree:
        """Flags of the leaves that hold what each piece or row reported, in the structure of the aux."""
        return jax.tree.unflatten(self._tree, [mode in ("stack", "concat") for mode in self._modes])

    def finish(
        self, added: list[Tree], weight: Array, kept: list[Array], kept_of_tail: list[Array] | None, cut: Cut
    ) -> Tree:
        """The whole batch's aux: `added` over all pieces, and `kept` by piece."""
        sums, pieces = iter(added), iter(kept)
        tails: Iterator[Array | None] = iter([None] * len(kept) if kept_of_tail is None else kept_of_tail)
        finished = []
        for node, mode in zip(self._nodes, self._modes, strict=True):
            if mode in ("mean", "sum"):
                finished.append(_finish(node, mode, next(sums), weight))
            else:
                finished.append(_put_together(mode, next(pieces), next(tails), cut))
        return jax.tree.unflatten(self._tree, finished)


def of_only_piece(modes: Tree, aux: Tree) -> Tree:
    """What is reported where there is nothing to reduce."""
    nodes, tree = jax.tree.flatten(aux, is_leaf=is_ratio)
    by_leaf = zip(nodes, modes_by_leaf(modes, aux), strict=True)
    return jax.tree.unflatten(
        tree,
        [ratio(node) if is_ratio(node) else node[None] if mode == "stack" else node for node, mode in by_leaf],
    )


def needs_two_shapes(modes: Tree, aux: Tree) -> bool:
    """Whether there are leaves whose leading axis may or may not be rows."""
    nodes = jax.tree.leaves(aux, is_leaf=is_ratio)
    by_leaf = zip(nodes, modes_by_leaf(modes, aux), strict=True)
    return any(mode == "auto" and not is_ratio(node) and node.ndim for node, mode in by_leaf)


def modes_by_leaf(modes: Tree, aux: Tree) -> list[Mode]:
    """A mode for every node of aux."""
    for mode in jax.tree.leaves(modes):
        if mode not in MODES:
            raise OptionError(f"aux must hold {', '.join(map(repr, MODES))}, got {mode!r}")
    nodes, tree = jax.tree.flatten(aux, is_leaf=is_ratio)
    try:
        return jax.tree.leaves(jax.tree.broadcast(modes, jax.tree.unflatten(tree, range(len(nodes)))))
    except ValueError as error:
        raise OptionError(f"aux= must be a mode, or modes in the structure of what is reported: {error}") from error


def is_ratio(node: Any) -> bool:
    """Whether a node says itself how it adds up."""
    return isinstance(node, Mean | Sum)


def ratio(node: Mean | Sum) -> Array:
    """Its value, and 0 where nothing was counted."""
    total = wide(jnp.asarray(node.total))
    if isinstance(node, Sum):
        return total
    count = as_count("a metric", node.count)
    return jnp.where(count == 0, 0, total / jnp.where(count == 0, 1, count))


def _mode_of(node: Any, rows: int, other: Any, other_rows: int) -> Mode:
    if is_ratio(node):
        return "sum"
    per_row, left_over = divmod(node.shape[0], rows) if node.ndim else (0, 0)
    if per_row and not left_over and other.shape == (per_row * other_rows, *node.shape[1:]):
        return "concat"
    if jnp.issubdtype(node.dtype, jax.dtypes.prng_key):
        raise LossTypeError('aux holds a random key, which cannot be averaged: give aux="stack" for it')
    return "sum" if jnp.issubdtype(node.dtype, jnp.integer) else "mean"


def _addend(node: Any, mode: Mode, weight: Array) -> Tree:
    if isinstance(node, Mean):
        count = as_count("a metric", node.count)
        return wide(jnp.where(count == 0, 0, node.total)), count
    if isinstance(node, Sum):
        return wide(jnp.asarray(node.total))
    return wide(node) if mode == "sum" else wide(node) * weight


def _finish(node: Any, mode: Mode, added: Tree, weight: Array) -> Any:
    if isinstance(node, Mean):
        return ratio(Mean(*added))
    if isinstance(node, Sum):
        return added
    if mode == "sum":
        return added if node.dtype == bool else added.astype(node.dtype)
    mean = added / jnp.where(weight == 0, 1, weight)
    return mean.astype(node.dtype) if jnp.issubdtype(node.dtype, jnp.inexact) else mean


def _put_together(mode: Mode, pieces: Array, tail: Array | None, cut: Cut) -> Array:
    if mode == "stack":
        return pieces if tail is None else jnp.concatenate([pieces, tail[None]])
    if pieces.ndim < 2:
        raise OptionError('aux="concat" needs an axis to put pieces together along: use "stack" for scalars')
    if pieces.shape[1] % cut.size == 0:
        return cut.in_row_order(pieces, tail)
    flat = pieces.reshape(-1, *pieces.shape[2:])
    return flat if tail is None else jnp.concatenate([flat, tail])
