"""The verdict on a batch: read once on the host whether all is well, and whether anything was counted."""

import math
from dataclasses import dataclass

from torch import Tensor

from .._errors import CountError
from ._host import read_once
from ._loss import Count, Number
from ._tokens import refuse_ignored_labels
from ._totals import Total, Totals


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the host has to know of a batch.

    Args:
        counts: each term's count; still a tensor where nobody had to read it.
        nonfinite: what is infinite or not a number, in words; None if nothing is or nobody asked.
    """

    counts: dict[str, Count]
    nonfinite: str | None

    @property
    def counted_nothing(self) -> bool:
        """Whether every term was divided by a count of 0."""
        return all(count == 0 for count in self.counts.values())


def judge(
    totals: Totals,
    *,
    declared: dict[str, Count] | None = None,
    norm: Tensor | None = None,
    ignored_labels: Tensor | None = None,
    look_for_nonfinite: bool = False,
) -> Verdict:
    """Read all that has to be known, in one transfer, and check it.

    Args:
        totals: what was summed.
        declared: what `counts=` said of each term.
        norm: the gradient's, where it was computed.
        ignored_labels: a flag, whether the labels of a scalar loss hold -100.
        look_for_nonfinite: whether anybody wants to know.
    """
    declared = declared or {}
    wanted: dict[str, Tensor] = {}
    for name, term in totals.terms.items():
        if look_for_nonfinite:
            wanted[f"values of {name}"] = term.values
        if term.counts is not None and isinstance(term.count, Tensor):
            wanted[f"counts of {name}"] = term.counts
            wanted[f"count of {name}"] = term.count
        if isinstance(declared.get(name), Tensor):
            wanted[f"declared {name}"] = declared[name]  # type: ignore[assignment]
    if look_for_nonfinite and norm is not None:
        wanted["norm"] = norm
    if ignored_labels is not None:
        wanted["ignored labels"] = ignored_labels
    read = {name: value.tolist() for name, value in zip(wanted, read_once(list(wanted.values())), strict=True)}

    counts = {name: _count(read, name, term) for name, term in totals.terms.items()}
    for name, count in counts.items():
        _check_counts(name, read.get(f"counts of {name}", []))
        if name in declared:
            _check_declared(name, count, read.get(f"declared {name}", [declared[name]])[0])
    if read.get("ignored labels", [False])[0]:
        refuse_ignored_labels()
    return Verdict(dict(counts), _nonfinite(list(totals.terms), read) if look_for_nonfinite else None)


def _count(read: dict[str, list[Number]], name: str, term: Total) -> Number:
    return read[f"count of {name}"][0] if isinstance(term.count, Tensor) else term.count


def _check_counts(name: str, counts: list[Number]) -> None:
    for piece, count in enumerate(counts, start=1):
        if count < 0:  # a NaN is for _nonfinite to find
            raise CountError(
                f"the count of {name!r} must not be negative, got {count} in piece {piece} of {len(counts)}"
            )


def _check_declared(name: str, count: Number, declared: Number) -> None:
    exact = isinstance(count, int) and isinstance(declared, int)
    if declared != count if exact else not math.isclose(declared, count, rel_tol=1e-5):
        raise CountError(
            f"counts= says that the batch holds {declared} for term {name!r}, but the loss counted {count}: "
            "both must count the same items"
        )


def _nonfinite(names: list[str], read: dict[str, list[Number]]) -> str | None:
    for name in names:
        values = read.get(f"values of {name}", [])
        counts = read.get(f"counts of {name}", [1] * len(values))
        for piece, (value, count) in enumerate(zip(values, counts, strict=True), start=1):
            if not math.isfinite(count):
                return f"term {name!r} of piece {piece} of {len(values)} has the count {count}"
            if not math.isfinite(value) and count != 0:
                return f"term {name!r} of piece {piece} of {len(values)} is {value}"
    norm = read.get("norm", [0.0])[0]
    return None if math.isfinite(norm) else f"the norm of the gradient is {norm}"
