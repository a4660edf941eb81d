"""What a loss function may return, read into terms.

    a scalar          the mean over the piece's rows:  total = rows · scalar,  count = rows
    Mean(total, n)    total,  count = n
    Sum(total)        total,  not divided
    a mapping         several terms by name, each divided by its own count
    (loss, metrics)   metrics are read the same way, reported and not differentiated

Reading never looks at a value on a device, so it never waits for one.
"""

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._errors import CountError, LossError, LossTypeError
from .._mean import Mean, Sum
from .._terms import ONLY_TERM, Per, described, named, named_terms, title

LossFunction = Callable[[Any], Any]
CountFunction = Callable[[Any], Any]
Number = int | float
Count = Number | Tensor

_LOSS = title(ONLY_TERM)


@dataclass(slots=True)  # these two are not frozen, as they are made for each piece and that would take twice as long
class Term:
    """One piece's part of a term: `weight · value` of the total and `count` of the count."""

    value: Tensor
    weight: int
    count: Count
    per: Per


@dataclass(slots=True)
class Reading:
    """What the loss function said of one piece."""

    terms: dict[str, Term]
    metrics: dict[str, Term]


def read(returned: Any, rows: int | None) -> Reading:
    """The terms and metrics in what a loss function returned for a piece of `rows` rows."""
    if isinstance(returned, (Tensor, Mean)):  # most are, and whatever happens here happens for each piece
        return Reading({ONLY_TERM: _term(_LOSS, returned, rows)}, {})
    metrics: dict[str, Term] = {}
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned, given = returned
        metrics = {name: _metric(name, value, rows) for name, value in named(given, "metrics").items()}
    instead = ", a Mean or a Sum" if isinstance(returned, Mapping) else ", a Mean, a Sum or a mapping of these"
    terms = {name: _term(title(name), value, rows, instead) for name, value in named_terms(returned).items()}
    return Reading(terms, metrics)


def _term(what: str, value: Any, rows: int | None, instead: str = "") -> Term:
    if isinstance(value, Mean):
        total = _scalar(what, value.total, of="the total of ")
        return Term(total, 1, _count(what, value.count, total.device), Per.OWN_COUNT)
    if isinstance(value, Sum):
        return Term(_scalar(what, value.total, of="the total of "), 1, 1, Per.NOTHING)
    value = _scalar(what, value, instead)
    if rows is None:
        raise LossError(
            f"{what} is a scalar, a mean over rows, but the rows of this piece are not known: return "
            "Mean(total, count), or tell them with .add(loss, rows=...)"
        )
    return Term(value, rows, rows, Per.ROWS)


def _metric(name: str, value: Any, rows: int | None) -> Term:
    """Metrics are not differentiated, so plain numbers do as well."""
    what = f"metric {name!r}"
    if isinstance(value, Mean):
        count = value.count.detach() if isinstance(value.count, Tensor) else value.count
        value = Mean(_as_tensor(value.total), count)
    elif isinstance(value, Sum):
        value = Sum(_as_tensor(value.total))
    return _term(what, _as_tensor(value), rows)


def _as_tensor(value: Any) -> Any:
    """Numbers as tensors that keep all their digits."""
    if isinstance(value, numbers.Integral):
        return torch.tensor(int(value))
    return torch.tensor(float(value), dtype=torch.float64) if isinstance(value, numbers.Real) else value


def _scalar(what: str, value: Any, instead: str = "", *, of: str = "") -> Tensor:
    if isinstance(value, Tensor) and not value.dim() and not value.is_complex():
        return value
    what = of + what
    if not isinstance(value, Tensor):
        raise LossTypeError(
            f"{what} must be a scalar tensor{instead}, got {described(value)} of type {type(value).__name__}"
        )
    if value.dim():
        raise LossError(
            f"{what} must be a scalar, got shape {tuple(value.shape)}: return Mean.of(loss) for the mean of "
            "its entries, or loss.mean() where every row counts the same"
        )
    raise LossError(f"{what} must be real, got {value.dtype}")


def _count(what: str, count: Any, device: torch.device | None = None) -> Count:
    if isinstance(count, Tensor):
        if count.dim():
            raise CountError(f"the count of {what} must be a scalar, got shape {tuple(count.shape)}: sum it first")
        if count.requires_grad:
            raise CountError(
                f"the count of {what} requires grad: a count is a constant of the batch; "
                "detach it, or keep the ratio inside a loss that is not split"
            )
        if device is None or count.device == device or count.device.type != "cpu":
            return count
        count = count.item()  # the host knows it; a copy to the device would wait for the device
    if not isinstance(count, numbers.Real):
        raise CountError(
            f"the count of {what} must be a number or a scalar tensor, got {described(count)} "
            f"of type {type(count).__name__}"
        )
    number = int(count) if isinstance(count, numbers.Integral) else float(count)
    if number < 0:
        raise CountError(f"the count of {what} must not be negative, got {number}")
    # whether one that is not finite is an error is for `on_nonfinite` to say, at the end, where tensors are looked at
    return number if math.isfinite(number) else torch.full((), number, device=device)


def read_counts(given: Any, what: str = "counts=") -> dict[str, Count]:
    """What the user's `counts=` said of one piece, by term."""
    if not isinstance(given, Mapping):
        given = {ONLY_TERM: given}
    return {name: _count(f"term {name!r} in {what}", count) for name, count in named(given, what).items()}
