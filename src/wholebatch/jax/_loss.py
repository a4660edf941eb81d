"""What a loss function may return, read into totals and counts.

    a scalar          the mean over the piece's rows:  total = rows · scalar
    Mean(total, n)    total,  count = n
    Sum(total)        total,  not divided
    a mapping         several terms by name, each divided by its own count

Everything is read while tracing: what is wrong is an error there, and never a NaN later.
"""

import math
from dataclasses import dataclass
from typing import Any

from jax import Array
from jax import numpy as jnp

from .._errors import CountError, LossError, LossTypeError
from .._mean import Mean, Sum
from .._terms import Per, described, named_terms, title
from ._tree import is_array_like

Kinds = dict[str, Per]
"""What each term is divided by."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the loss function said of one piece; values are as they were returned, and counts those of `Mean`s."""

    kinds: Kinds
    values: dict[str, Array]
    counts: dict[str, Array]


def read(returned: Any) -> Reading:
    """The terms in what a loss function returned."""
    if isinstance(returned, tuple):
        raise LossTypeError(
            f"the loss function returned a tuple of {len(returned)}: give has_aux=True if it is a loss and something "
            "to report besides"
        )
    kinds: Kinds = {}
    values: dict[str, Array] = {}
    counts: dict[str, Array] = {}
    for name, term in named_terms(returned).items():
        if isinstance(term, Mean):
            kinds[name] = Per.OWN_COUNT
            values[name] = _scalar(f"the total of {title(name)}", term.total)
            counts[name] = as_count(title(name), term.count)
        elif isinstance(term, Sum):
            kinds[name] = Per.NOTHING
            values[name] = _scalar(f"the total of {title(name)}", term.total)
        else:
            kinds[name] = Per.ROWS
            values[name] = _scalar(title(name), term)
    return Reading(kinds, values, counts)


def as_count(what: str, count: Any) -> Array:
    """A count as an array that can be summed: integers stay integers, 16 bits become 32."""
    if isinstance(count, int | float) and not (count >= 0 and math.isfinite(count)):
        raise CountError(f"the count of {what} must be finite and not negative, got {count}")
    if not is_array_like(count) or jnp.iscomplexobj(count):
        raise CountError(
            f"the count of {what} must be a number or a scalar array, got {described(count)} of type "
            f"{type(count).__name__}"
        )
    if jnp.shape(count):
        raise CountError(f"the count of {what} must be a scalar, got shape {jnp.shape(count)}: sum it first")
    return wide(jnp.asarray(count))


def at_least_32_bits(dtype: Any) -> Any:
    """The dtype that sums of such numbers need."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.promote_types(dtype, jnp.float32)
    return jnp.promote_types(dtype, jnp.int32)


def wide(array: Array) -> Array:
    """In the dtype that sums of it need."""
    return array.astype(at_least_32_bits(array.dtype))


def _scalar(what: str, value: Any) -> Array:
    if not isinstance(value, Array):
        raise LossTypeError(
            f"{what} must be a scalar array, a Mean, a Sum or a mapping of these, got {described(value)} of type "
            f"{type(value).__name__}"
        )
    if value.shape:
        raise LossError(
            f"{what} must be a scalar, got shape {value.shape}: return Mean.of(loss) for the mean of its entries, or "
            "loss.mean() where every row counts the same"
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise LossError(f"{what} must be real and floating point, got {value.dtype}")
    return value
