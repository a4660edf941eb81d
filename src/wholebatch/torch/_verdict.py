"""The verdict on a batch: read once on the host whether all is well, and whether anything was counted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from .._errors import CountError, LossError
from ._host import Asked, HostReads
from ._loss import Count, Number
from ._tokens import refuse_ignored_labels
from ._totals import Total, Totals


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the host has to know of a batch.

    Args:
        counts: each term's count.
        nonfinite: what is infinite or not a number, in words; None if nothing is or nobody asked.
        doubtful: a piece that counts nothing and whose loss is not finite, in words: it adds nothing to the loss,
            but its gradient may still have spoilt the sums. None if there is none or nobody asked.
    """

    counts: dict[str, Count]
    nonfinite: str | None
    doubtful: str | None

    @property
    def counted_nothing(self) -> bool:
        """Whether every term was divided by a count of 0."""
        return all(count == 0 for count in self.counts.values())


def judge(
    totals: Totals,
    *,
    declared: Mapping[str, Count] | None = None,
    graphless: Sequence[int] = (),
    norm: Tensor | None = None,
    ignored_labels: Tensor | None = None,
    look_for_nonfinite: bool = False,
) -> Verdict:
    """Read all that has to be known, in one transfer, and check it.

    Args:
        totals: what was summed.
        declared: what `counts=` said of each term.
        graphless: pieces (from 1 on) whose loss had no graph, which is right only if they count nothing.
        norm: the gradient's, where it was computed.
        ignored_labels: a flag, whether the labels of a scalar loss hold -100.
        look_for_nonfinite: whether anybody wants to know.
    """
    reads = HostReads()
    terms = [
        _Term(name, total, (declared or {}).get(name), reads, look_for_nonfinite)
        for name, total in totals.terms.items()
    ]
    asked_norm = reads.ask(norm if look_for_nonfinite else None)
    asked_labels = reads.ask(ignored_labels)
    reads.fetch()

    if any(asked_labels.values):
        refuse_ignored_labels()
    for term in terms:
        term.check_counts()
    for piece in graphless:
        if any(term.is_counted_in(piece) for term in terms):
            raise LossError(
                f"the loss of piece {piece} has no graph: nothing in it depends on a tensor that requires grad"
            )
    problems = [problem for term in terms if (problem := term.nonfinite())]
    problems += [f"the norm of the gradient is {norm}" for norm in asked_norm.values if not math.isfinite(norm)]
    doubts = [doubt for term in terms if (doubt := term.doubtful())]
    return Verdict({term.name: term.count for term in terms}, next(iter(problems), None), next(iter(doubts), None))


class _Term:
    """A term and what was asked about it."""

    def __init__(
        self, name: str, total: Total, declared: Count | None, reads: HostReads, look_for_nonfinite: bool
    ) -> None:
        self.name = name
        self._given_count, self._given_declared = total.count, declared
        self._values = reads.ask(total.values if look_for_nonfinite else None)
        self._counts = reads.ask(total.counts)
        self._count = reads.ask(total.count if isinstance(total.count, Tensor) else None)
        self._declared = reads.ask(declared if isinstance(declared, Tensor) else None)

    @property
    def count(self) -> Number:
        return _known(self._count, self._given_count)

    def check_counts(self) -> None:
        for piece, count in enumerate(self._counts.values, start=1):
            if count < 0:  # a NaN is for nonfinite to find
                raise CountError(
                    f"the count of {self.name!r} must not be negative, got {count} in {self._piece(piece)}"
                )
        if self._given_declared is None or not math.isfinite(self.count):
            return
        declared = _known(self._declared, self._given_declared)
        whole = float(declared).is_integer() and float(self.count).is_integer()
        # weights may have been added up in another order, whole numbers come out the same in any
        if declared != self.count if whole else not math.isclose(declared, self.count, rel_tol=1e-6):
            raise CountError(
                f"counts= says that the batch holds {declared} for term {self.name!r}, but the loss counted "
                f"{self.count}: both must count the same items"
            )

    def is_counted_in(self, piece: int) -> bool:
        """Whether a piece counts something, by what was read; what the host knew was seen to before."""
        return bool(self._counts.values) and self._counts.values[piece - 1] != 0

    def nonfinite(self) -> str | None:
        for piece, count in enumerate(self._counts.values, start=1):
            if self._values.values and not math.isfinite(count):
                return f"term {self.name!r} of {self._piece(piece)} has the count {count}"
        for piece, value in enumerate(self._values.values, start=1):
            if not math.isfinite(value) and (not self._counts.values or self.is_counted_in(piece)):
                return f"term {self.name!r} of {self._piece(piece)} is {value}"
        return None

    def doubtful(self) -> str | None:
        for piece, value in enumerate(self._values.values, start=1):
            if not math.isfinite(value):
                return f"term {self.name!r} of {self._piece(piece)}, which counts nothing, is {value}"
        return None

    def _piece(self, piece: int) -> str:
        return f"piece {piece} of {len(self._values.values or self._counts.values)}"


def _known(asked: Asked, given: Count) -> Number:
    return given if not isinstance(given, Tensor) else asked.values[0]
