"""How the gradient of each piece is weighted.

    L = Σ_terms (Σ_k T_k) / (Σ_k C_k)

A denominator that is known before the first piece goes into the seed of each piece's backward: the rows, a `Sum`'s 1.
The count of a single `Mean` is learned from the pieces and divided out once at the end, as `factor`. Where a `Mean`
stands beside other terms its count is summed beforehand, by a scan that returns counts alone: nothing there needs the
model, unless the counts do, and the compiler drops it.

A seed has the precision of the loss, and in float16 a sum overflows that a mean would not. So with 16 bits a single
term is scaled by a power of two near its denominator, which no rounding touches, and `factor` makes up for the rest.
"""

import math
from functools import reduce
from operator import add
from typing import Any

import jax
from jax import Array
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .._errors import CountError
from .._terms import Per
from ._function import Outcome, own_counts
from ._loss import Kinds
from ._tree import Tree

Number = int | float


class Weights:
    """The weights of one batch.

    Args:
        kinds: what each term is divided by.
        rows: rows of the whole batch.
        counts: the whole batch's, where they were summed beforehand.
        narrow: whether a seed would have 16 bits, or gradients pass through them.
    """

    def __init__(self, kinds: Kinds, rows: int, counts: dict[str, Array], *, narrow: bool) -> None:
        self._kinds = kinds
        self._learned = next((name for name in own_counts(kinds) if name not in counts), None)
        self._factor: Array | Number = 1
        if self._learned is not None:
            self._seeds: dict[str, Array | Number] = {self._learned: 1}
            return
        denominators = {Per.ROWS: rows, Per.NOTHING: 1}
        self._seeds = {name: reciprocal(counts.get(name, denominators.get(per, 1))) for name, per in kinds.items()}
        if narrow and len(kinds) == 1:
            ((name, exact),) = self._seeds.items()
            self._seeds[name] = _power_of_two_near(exact)
            self._factor = exact / self._seeds[name]

    def objective(self, outcome: Outcome, rows: int, differentiated: Tree) -> Array:
        """What a piece of `rows` rows adds, as the function to differentiate."""
        counts = constants(outcome.counts, differentiated)
        terms = []
        for name, value in outcome.values.items():
            share = self._seeds[name] * (rows if self._kinds[name] is Per.ROWS else 1)
            counted = jnp.where(counts[name] == 0, 0, value) if name in counts else value
            terms.append(counted if isinstance(share, Number) and share == 1 else counted * share)
        return reduce(add, terms)

    def factor(self, counts: dict[str, Array]) -> Array | Number:
        """What the summed gradients have to be multiplied by, once the pieces' counts are known."""
        return self._factor if self._learned is None else reciprocal(counts[self._learned])


def counts_come_first(kinds: Kinds, *, narrow: bool) -> bool:
    """Whether there is a count that must be known before the first backward."""
    return bool(own_counts(kinds)) and (len(kinds) > 1 or narrow)


def reciprocal(count: Array | Number) -> Array | Number:
    """`1 / count`, and 0 for 0."""
    if isinstance(count, Number):
        return 1 / count
    return jnp.where(count == 0, 0, 1 / jnp.where(count == 0, 1, count))


def constants(counts: dict[str, Array], differentiated: Tree) -> dict[str, Array]:
    """The counts, unless one depends on what is differentiated: the derivative of the ratio would have another term."""
    leaves = jax.tree.leaves(differentiated)
    if not leaves:
        return counts
    # the first is a witness that it is this derivative that is asked, not one around it
    return {name: _constant(count, leaves[0], name) for name, count in counts.items()}


def _constant(count: Array, witness: Array, name: str) -> Array:
    @jax.custom_jvp
    def as_it_is(count: Array, witness: Array) -> Array:
        return count

    def rule(primals: Any, tangents: Any) -> Any:
        if jnp.issubdtype(count.dtype, jnp.inexact) and not isinstance(tangents[0], SymbolicZero):
            raise CountError(
                f"the count of {name!r} depends on what is differentiated, but a count is a constant of the batch: "
                "wrap it in jax.lax.stop_gradient"
            )
        return primals[0], tangents[0]

    as_it_is.defjvp(rule, symbolic_zeros=True)
    return as_it_is(count, witness)


def _power_of_two_near(number: Array | Number) -> Array | Number:
    """Exactly: a number over its mantissa is one."""
    if isinstance(number, Number):
        return number / math.frexp(number)[0]
    return jnp.where(number > 0, number / jnp.frexp(number)[0], 1)
