"""Sums of totals and counts over the pieces of a batch, kept on the device they were made on.

    total = Σ weight_k · value_k,   count = Σ count_k,   ratio = total / count

Counts that are plain numbers are summed as numbers; integer tensors stay integers; everything of 16 bits is
summed in float32. A piece whose count is 0 adds nothing, not even a NaN.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ._loss import Count, Number, Per, Term


@dataclass(slots=True)
class Column:
    """One term, written down piece by piece."""

    per: Per
    values: list[Tensor] = field(default_factory=list)
    weights: list[Number] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)

    def append(self, term: Term) -> None:
        value = term.value.detach()
        self.values.append(torch.zeros_like(value) if is_zero(term.count) else value)
        self.weights.append(term.weight)
        self.counts.append(term.count)

    def total(self) -> "Total":
        values = _stacked(self.values)
        weighted = values
        if self.per is Per.ROWS:
            weighted = _stacked(list(torch._foreach_mul(self.values, self.weights)))
        if self.per is Per.NOTHING:
            return Total(weighted.sum(), 1, values, None)
        count = sum_counts(self.counts)
        if not isinstance(count, Tensor):
            return Total(weighted.sum(), count, values, None)
        counts = _stacked([torch.as_tensor(count) for count in self.counts])
        counting = torch.where(counts.to(values.device) > 0, weighted, 0)
        return Total(counting.sum(), count, values, counts)


@dataclass(frozen=True, slots=True)
class Total:
    """One term of the whole batch.

    Args:
        total: the summed loss.
        count: what it is divided by; 1 for a Sum.
        values: what the pieces said, one entry each.
        counts: what they counted, where that is not known on the host.
    """

    total: Tensor
    count: Count
    values: Tensor
    counts: Tensor | None

    @property
    def ratio(self) -> Tensor:
        """The term's value, and 0 where nothing was counted."""
        if isinstance(self.count, Tensor):
            return torch.where(self.count > 0, self.total / self.count, 0)
        return self.total / self.count if self.count else torch.zeros_like(self.total)


@dataclass(frozen=True, slots=True)
class Totals:
    """All terms and metrics of the whole batch.

    Args:
        learned: the term whose count is still to be divided out of the gradients, if there is one.
    """

    terms: dict[str, Total]
    metrics: dict[str, Total]
    learned: str | None

    @property
    def factor(self) -> Number | Tensor:
        """What the summed gradients have to be multiplied by, once."""
        return 1 if self.learned is None else reciprocal(self.terms[self.learned].count)


def sum_counts(counts: list[Count]) -> Count:
    """Their sum: a number if all are numbers, else a tensor."""
    numbers = [count for count in counts if not isinstance(count, Tensor)]
    if len(numbers) == len(counts):
        return sum(numbers)
    return _stacked([count for count in counts if isinstance(count, Tensor)]).sum() + sum(numbers)


def reciprocal(count: Count) -> Number | Tensor:
    """`1 / count`, and 0 for 0; in float64 where the device has it, since counts are integers."""
    if not isinstance(count, Tensor):
        return 1 / count if count else 0.0
    wide = count.to(torch.float32 if count.device.type == "mps" else torch.float64)
    return torch.where(wide > 0, 1 / wide, 0)


def _stacked(scalars: list[Tensor]) -> Tensor:
    stacked = torch.stack(scalars)
    return stacked.float() if stacked.dtype in (torch.float16, torch.bfloat16) else stacked


def is_zero(count: Count) -> bool:
    """Whether a count is known to be 0 without asking a device."""
    return not isinstance(count, Tensor) and count == 0
