"""Sums of totals and counts over the pieces of a batch, kept on the device they were made on.

    total = Σ weight_k · value_k,   count = Σ count_k,   ratio = total / count

A piece whose count is 0 adds nothing, not even a NaN.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._terms import Per
from ._loss import Count, Number, Term
from ._series import Series, numbers_on


class Column:
    """One term, written down piece by piece."""

    def __init__(self, per: Per, expected: int | None) -> None:
        self.per = per
        self._values = Series(expected)
        self._counts = Series(expected)

    def append(self, term: Term) -> None:
        self._values.append(0 if is_zero(term.count) else term.value)
        self._counts.append(term.count)

    def total(self) -> "Total":
        values, counts = self._values.on_device(), self._counts.on_device()
        if values is None:  # no piece counted anything
            values = torch.zeros(len(self._counts))
        weighted = values
        if self.per is Per.ROWS:
            rows = self._counts.numbers
            alike = len(set(rows)) == 1  # a number is multiplied by sooner than a tensor of them is made
            weighted = values * (rows[0] if alike else numbers_on(values.device, rows, values.dtype))
        if counts is not None:
            weighted = torch.where(counts.to(values.device) == 0, 0, weighted)
        count = 1 if self.per is Per.NOTHING else self._counts.sum()
        return Total(self.per, weighted.sum(), count, values, counts)


@dataclass(frozen=True, slots=True)
class Total:
    """One term of the whole batch.

    Args:
        per: what it is divided by.
        total: the summed loss.
        count: how much of that there is; 1 for a Sum.
        values: what the pieces said, one entry each.
        counts: what they counted, where that is not known on the host.
    """

    per: Per
    total: Tensor
    count: Count
    values: Tensor
    counts: Tensor | None

    @property
    def ratio(self) -> Tensor:
        """The term's value, and 0 where nothing was counted."""
        if isinstance(self.count, Tensor):
            return torch.where(self.count == 0, 0, self.total / self.count)
        if self.count == 1:
            return self.total  # an integer Sum stays one
        return self.total / self.count if self.count else torch.zeros_like(self.total)


class Totals(NamedTuple):
    """All terms and metrics of the whole batch."""

    terms: dict[str, Total]
    metrics: dict[str, Total]


def reciprocal(count: Count) -> Number | Tensor:
    """`1 / count`, and 0 for 0; in float64 where the device has it, since counts are integers."""
    if not isinstance(count, Tensor):
        return 1 / count if count else 0.0
    wide = count.to(torch.float32 if count.device.type == "mps" else torch.float64)
    return torch.where(wide == 0, 0, 1 / wide)


def is_positive(count: Count) -> bool:
    """Whether a count is known to be positive without asking a device."""
    return not isinstance(count, Tensor) and count > 0


def is_zero(count: Count) -> bool:
    """Whether a count is known to be 0 without asking a device."""
    return not isinstance(count, Tensor) and count == 0
