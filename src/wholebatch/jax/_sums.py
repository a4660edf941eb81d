"""Local sums: one scan over the equal pieces, and one more call for the remainder.

    G = Σ_k ∇T_k      T = Σ_k T_k      C = Σ_k C_k

Each in a carry of a dtype that does not stop growing. A piece that counts nothing adds nothing, not even a NaN.
"""

from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax import numpy as jnp

from .._terms import Per
from ._aux import Reduction
from ._cut import Cut
from ._function import Function, Outcome, Piece
from ._loss import at_least_32_bits, wide
from ._tree import Tree
from ._weights import Weights

SumDtype = Any
"""A dtype to sum gradients in; "auto" is float32 for 16-bit gradients and a gradient's own dtype for all others."""


class Sums(NamedTuple):
    """What the pieces add up to."""

    totals: dict[str, Array]
    counts: dict[str, Array]
    aux: list[Tree]
    aux_weight: Array
    gradients: tuple[Tree, ...]
    """Last in the carry: XLA on CPU then needs one buffer less to divide them (tests/jax/test_programs.py)."""


class Pieces(NamedTuple):
    """A batch with its plan."""

    cut: Cut
    batch: list[Array]
    keys: tuple[Tree, ...]
    """One for each piece, along the leading axis."""

    def equal(self, i: Array | int, state: Tree) -> Piece:
        return Piece(self.cut.piece(self.batch, i), jax.tree.map(lambda keys: keys[i], self.keys), state)

    def tail(self, state: Tree) -> Piece:
        return Piece(self.cut.tail(self.batch), jax.tree.map(lambda keys: keys[-1], self.keys), state)


def sum_counts(function: Function, differentiated: tuple[Tree, ...], pieces: Pieces, state: Tree) -> dict[str, Array]:
    """The counts alone. What does not lead to them is dropped by the compiler."""

    def of(piece: Piece) -> dict[str, Array]:
        return function(differentiated, piece).counts

    def add_piece(counts: dict[str, Array], i: Array) -> tuple[dict[str, Array], None]:
        return _added(counts, of(pieces.equal(i, state))), None

    zeros = _zeros(jax.eval_shape(lambda: of(pieces.equal(0, state))))
    counts: dict[str, Array]
    counts, _ = lax.scan(add_piece, zeros, jnp.arange(pieces.cut.equal_pieces))
    return _added(counts, of(pieces.tail(state))) if pieces.cut.remainder else counts


def sum_pieces(
    function: Function,
    differentiated: tuple[Tree, ...],
    pieces: Pieces,
    state: Tree,
    weights: Weights,
    reduction: Reduction,
    accum_dtype: SumDtype,
) -> tuple[Sums, list[Array], list[Array] | None, Tree]:
    """The sums, what is kept of the aux of each equal piece and of the tail, and the state after the last piece."""
    cut = pieces.cut

    def of(piece: Piece, rows: int) -> tuple[Sums, list[Array], Tree]:
        return _of_piece(function, differentiated, piece, rows, weights, reduction)

    def add_piece(carry: tuple[Sums, Tree], i: Array) -> tuple[tuple[Sums, Tree], list[Array]]:
        sums, state = carry
        addend, kept, state = of(pieces.equal(i, state), cut.size)
        return (_added(sums, addend), state), kept

    zeros = _zeros(jax.eval_shape(lambda: of(pieces.equal(0, state), cut.size)[0]))
    if accum_dtype != "auto":
        zeros = zeros._replace(gradients=jax.tree.map(lambda zero: in_dtype(accum_dtype, zero), zeros.gradients))
    (sums, state), kept = lax.scan(add_piece, (zeros, state), jnp.arange(cut.equal_pieces))
    if not cut.remainder:
        return sums, kept, None, state
    addend, kept_of_tail, state = of(pieces.tail(state), cut.remainder)
    return _added(sums, addend), kept, kept_of_tail, state


def _of_piece(
    function: Function,
    differentiated: tuple[Tree, ...],
    piece: Piece,
    rows: int,
    weights: Weights,
    reduction: Reduction,
) -> tuple[Sums, list[Array], Tree]:
    def objective(differentiated: tuple[Tree, ...]) -> tuple[Array, Outcome]:
        outcome = function(differentiated, piece)
        return weights.objective(outcome, rows, differentiated), outcome

    (_, outcome), gradients = jax.value_and_grad(objective, has_aux=True)(differentiated)
    counts = outcome.counts
    if len(counts) == len(outcome.values):  # else there is a term that always counts
        counted = _any([count != 0 for count in counts.values()])
        gradients = jax.tree.map(lambda gradient: jnp.where(counted, gradient, 0), gradients)
    totals = {
        name: wide(value) * rows if function.kinds[name] is Per.ROWS else _if_counted(value, counts.get(name))
        for name, value in outcome.values.items()
    }
    weight = _as_weight(*counts.values()) if len(counts) == len(outcome.values) == 1 else _as_weight(rows)
    added, kept = reduction.of_piece(outcome.aux, weight)
    return Sums(totals, counts, added, weight, gradients), kept, outcome.state


def _added(sums: Any, addend: Any) -> Any:
    return jax.tree.map(lambda total, part: total + part.astype(total.dtype), sums, addend)


def _if_counted(value: Array, count: Array | None) -> Array:
    return value if count is None else jnp.where(count == 0, 0, value)


def _as_weight(count: Array | int) -> Array:
    return jnp.asarray(count, jnp.result_type(count, float))


def _any(conditions: list[Array]) -> Array:
    return jnp.stack(conditions).any()


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(
        lambda shape: jnp.zeros(shape.shape, at_least_32_bits(shape.dtype), out_sharding=shape.sharding), shapes
    )


def in_dtype(dtype: Any, array: Array) -> Array:
    """Cast to a real dtype; what is complex stays complex."""
    return array.astype(jnp.promote_types(dtype, jnp.complex64) if jnp.iscomplexobj(array) else dtype)
