"""The user's function of a piece, run by Python once for every number of rows.

`jit` keeps the trace: the counts, the gradients and the shapes of what comes back are all read from it, and inlined
where they are used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import Array

from .._errors import LossError, LossTypeError
from .._terms import Per, title
from ._loss import Kinds, read
from ._tree import Tree


class Piece(NamedTuple):
    """What goes into the function, besides what is differentiated."""

    batch: list[Array]
    keys: tuple[Tree, ...]
    state: Tree


class Outcome(NamedTuple):
    """What came back for a piece: each term's value, the counts of its `Mean`s, what else is reported, the state."""

    values: dict[str, Array]
    counts: dict[str, Array]
    aux: Tree
    state: Tree


Call = Callable[[tuple[Tree, ...], Piece], tuple[Any, Tree]]


@dataclass
class Function:
    """Calls `fun(differentiated, piece) -> (returned, state)` and reads what it returned.

    Args:
        fun: the user's function, with its arguments in place.
        has_aux: whether it returns a pair of the loss and what is reported besides.
    """

    fun: Call
    has_aux: bool

    def __post_init__(self) -> None:
        self.kinds: Kinds = {}
        self._traced = jax.jit(self._read, inline=True)

    def __call__(self, differentiated: tuple[Tree, ...], piece: Piece) -> Outcome:
        outcome: Outcome = self._traced(differentiated, piece)
        return outcome

    def _read(self, differentiated: tuple[Tree, ...], piece: Piece) -> Outcome:
        returned, state = self.fun(differentiated, piece)
        aux: Tree = ()
        if self.has_aux:
            if not (isinstance(returned, tuple) and len(returned) == 2):
                raise LossTypeError(
                    f"has_aux=True, so the loss function must return a pair (loss, aux), got {type(returned).__name__}"
                )
            returned, aux = returned
        reading = read(returned)
        _refuse_other_terms(self.kinds or reading.kinds, reading.kinds)
        self.kinds = reading.kinds
        return Outcome(reading.values, reading.counts, aux, state)


def _refuse_other_terms(before: Kinds, now: Kinds) -> None:
    """Pieces of another size must return the same terms."""
    if before.keys() != now.keys():
        name = next(iter(before.keys() ^ now.keys()))
        raise LossError(
            f"terms differ between pieces: {name!r} is there for some numbers of rows and not for others; return it "
            "for every piece, with count 0 where there is nothing to count"
        )
    for name, per in now.items():
        if per is not before[name]:
            kinds = " and ".join(sorted(kind.value for kind in (per, before[name])))
            raise LossError(
                f"{title(name)} is divided by {kinds}, depending on the number of rows: return the same kind of loss"
            )


def own_counts(kinds: Kinds) -> list[str]:
    """The terms that are divided by a count of their own."""
    return [name for name, per in kinds.items() if per is Per.OWN_COUNT]
