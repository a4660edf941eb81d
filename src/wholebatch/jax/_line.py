"""The line of rooms: cut → local sums → agree → reduce → finalise → result.

gradient = factor · Σ_devices Σ_k ∇T_k
"""

from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax import numpy as jnp

from .._terms import Per
from ._aux import Reduction, needs_two_shapes, of_only_piece
from ._cut import Cut
from ._function import Function, Outcome, Piece
from ._keys import split_keys
from ._mesh import Devices
from ._sums import Pieces, SumDtype, in_dtype, sum_counts, sum_pieces
from ._tree import Tree
from ._weights import Number, Weights, constants, counts_come_first


class Whole(NamedTuple):
    """What a batch came to."""

    loss: Any
    terms: Any
    aux: Tree
    gradients: Any
    state: Tree


def whole_batch(
    function: Function,
    differentiated: tuple[Tree, ...],
    batch: list[Array],
    keys: tuple[Tree, ...],
    state: Tree,
    cut: Cut,
    *,
    accum_dtype: SumDtype,
    aux: Tree,
    devices: Devices,
) -> tuple[Whole, Whole]:
    """The loss, what is reported besides, and the gradient of a batch, however it is cut.

    With it come flags (in the same structure) of what is a device's own, as the rest is the same on all.

    Args:
        function: of a piece.
        differentiated: what the gradient is for.
        batch: arrays that are cut, with this device's rows.
        keys: random keys that are split.
        state: handed from piece to piece.
        cut: the plan of these rows.
        accum_dtype: what gradients are summed in.
        aux: how what is reported is reduced.
        devices: who else has rows of the batch.
    """
    if cut.pieces == devices.number == 1:
        only = _only_piece(function, differentiated, Piece(batch, keys, state), accum_dtype, aux)
        return only, Whole(False, False, False, False, False)
    rows = cut.rows * devices.number
    pieces = Pieces(cut, batch, devices.own_keys(split_keys(keys, cut.pieces)))
    shape = _shape(function, differentiated, pieces.equal(0, state))
    other, other_rows = _shape_for_other_rows(function, differentiated, pieces, state, aux, shape)
    reduction = Reduction(aux, shape.aux, cut.size, other, other_rows)
    narrow = _narrow(shape, differentiated)
    first = counts_come_first(function.kinds, narrow=narrow)
    counts = devices.sum(sum_counts(function, differentiated, pieces, state)) if first else {}
    weights = Weights(function.kinds, rows, counts, narrow=narrow)
    local, kept, kept_of_tail, state = sum_pieces(
        function, differentiated, pieces, state, weights, reduction, accum_dtype
    )
    sums = devices.sum(local)
    counts = counts or sums.counts
    terms = {
        name: _quotient(total, _denominator(name, function, counts, rows)).astype(_dtype_of_term(name, shape))
        for name, total in sums.totals.items()
    }
    whole = Whole(
        _sum(terms),
        terms,
        reduction.finish(sums.aux, sums.aux_weight, kept, kept_of_tail, cut),
        _finalise(sums.gradients, weights.factor(counts), differentiated, accum_dtype),
        state,
    )
    return whole, Whole(False, False, reduction.by_piece(), False, False)


def _only_piece(
    function: Function, differentiated: tuple[Tree, ...], piece: Piece, accum_dtype: SumDtype, aux: Tree
) -> Whole:
    """Nothing is cut, so this is `jax.value_and_grad` and no more."""

    def objective(differentiated: tuple[Tree, ...]) -> tuple[Array, tuple[dict[str, Array], Outcome]]:
        outcome = function(differentiated, piece)
        counts = constants(outcome.counts, differentiated)
        terms = {name: _quotient(value, counts.get(name, 1)) for name, value in outcome.values.items()}
        return _sum(terms), (terms, outcome)

    (loss, (terms, outcome)), gradients = jax.value_and_grad(objective, has_aux=True)(differentiated)
    return Whole(
        loss,
        terms,
        of_only_piece(aux, outcome.aux),
        gradients if accum_dtype == "auto" else _finalise(gradients, 1, differentiated, accum_dtype),
        outcome.state,
    )


def _shape(function: Function, differentiated: tuple[Tree, ...], piece: Piece) -> Outcome:
    """What a piece comes to, as shapes."""
    outcome: Outcome = jax.eval_shape(lambda: function(differentiated, piece))
    return outcome


def _shape_for_other_rows(
    function: Function, differentiated: tuple[Tree, ...], pieces: Pieces, state: Tree, aux: Tree, shape: Outcome
) -> tuple[Tree | None, int]:
    """What is reported for another number of rows, where that is needed to see which axes are rows."""
    cut = pieces.cut
    if cut.remainder:
        return _shape(function, differentiated, pieces.tail(state)).aux, cut.remainder
    if not needs_two_shapes(aux, shape.aux):
        return None, 0
    piece = pieces.equal(0, state)
    twice = piece._replace(batch=[jnp.concatenate([leaf, leaf]) for leaf in piece.batch])
    return _shape(function, differentiated, twice).aux, 2 * cut.size


def _narrow(shape: Outcome, differentiated: tuple[Tree, ...]) -> bool:
    """Whether the loss has 16 bits, or gradients pass through float16."""
    in_16_bits = any(value.dtype.itemsize == 2 for value in shape.values.values())
    return in_16_bits or any(jnp.result_type(leaf) == jnp.float16 for leaf in jax.tree.leaves(differentiated))


def _denominator(name: str, function: Function, counts: dict[str, Array], rows: int) -> Array | int:
    return counts.get(name, rows if function.kinds[name] is Per.ROWS else 1)


def _dtype_of_term(name: str, shape: Outcome) -> Any:
    """What the quotient of a single piece would have."""
    value, count = shape.values[name], shape.counts.get(name)
    return value.dtype if count is None else jnp.result_type(value.dtype, count.dtype)


def _quotient(total: Array, count: Array | int) -> Array:
    """`total / count`, and 0 where nothing was counted."""
    if isinstance(count, int):
        return total if count == 1 else total / count
    nothing = count == 0
    return jnp.where(nothing, 0, jnp.where(nothing, 0, total) / jnp.where(nothing, 1, count))


def _sum(terms: dict[str, Array]) -> Array:
    return reduce(add, terms.values())


def _finalise(
    gradients: tuple[Tree, ...], factor: Array | float, differentiated: tuple[Tree, ...], accum_dtype: SumDtype
) -> tuple[Tree, ...]:
    """Divide once and round once: to the parameter's dtype, or to the one that was asked for."""

    def finish(gradient: Array, parameter: Any) -> Array:
        whole = gradient if isinstance(factor, Number) and factor == 1 else gradient * factor
        return _typed_as(parameter, whole) if accum_dtype == "auto" else in_dtype(accum_dtype, whole)

    finished: tuple[Tree, ...] = jax.tree.map(finish, gradients, differentiated)
    return finished


def _typed_as(parameter: Any, gradient: Array) -> Array:
    """In the parameter's dtype, and weakly typed where that is: only a cotangent may be, by what JAX makes public."""
    strong = gradient.astype(jnp.result_type(parameter))
    if not jax.typeof(parameter).weak_type:
        return strong
    weak: Array
    (weak,) = jax.linear_transpose(lambda p: lax.convert_element_type(p, strong.dtype), parameter)(strong)
    return weak
