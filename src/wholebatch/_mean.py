"""A loss as a ratio of two sums.

    L = Σ total_i / Σ count_i

over the rows, tokens or weights of a batch. Pieces of a batch add their totals and their counts; the
division is done once, by whoever holds all of them. Nothing here knows a framework: totals and counts are
numbers or arrays of any library.

The classes are written out because importing `dataclasses` takes longer than all of the core.
"""

import math
import sys
from typing import Any, Self

from ._errors import LossTypeError


class _Term:
    """What `Mean` and `Sum` share: a total that can be weighted, and no addition."""

    __slots__ = ()
    __array_ufunc__ = None  # so that NumPy scalars leave `weight * term` to __rmul__
    total: Any

    def _with_total(self, total: Any) -> Self:
        raise NotImplementedError

    def __mul__(self, weight: Any) -> Self:
        if isinstance(weight, _Term):
            return NotImplemented
        return self._with_total(self.total * weight)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Self:
        if isinstance(divisor, _Term):
            return NotImplemented
        return self._with_total(self.total / divisor)

    def __neg__(self) -> Self:
        return self._with_total(-self.total)

    def _refuse_addition(self, other: object) -> Any:
        raise LossTypeError(
            f"{type(self).__name__} and {type(other).__name__} cannot be added: each term of a loss is "
            'divided by its own count. Return a mapping instead, such as {"nll": Mean(...), "aux": Mean(...)}; '
            "the loss is then the sum of its terms"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = _refuse_addition


class Mean(_Term):
    """A loss that is `total` divided by `count`, where both add up over the pieces of a batch.

    Args:
        total: the summed loss, a scalar.
        count: what it is to be divided by: a number of rows or tokens, or a sum of weights.

    >>> loss = Mean(6.0, 4)
    >>> loss.value
    1.5
    >>> (0.5 * loss).total
    3.0
    """

    __slots__ = ("count", "total")
    __match_args__ = ("total", "count")
    count: Any

    def __init__(self, total: Any, count: Any) -> None:
        self.total = total
        self.count = count

    def __repr__(self) -> str:
        return f"Mean(total={self.total!r}, count={self.count!r})"

    @classmethod
    def of(cls, values: Any, where: Any = None) -> "Mean":
        """The mean of an array of per-item losses, over the items that `where` keeps.

        Args:
            values: per-item losses, an array of any framework.
            where: a mask of the same shape; weights are understood too, a mask being weights of 0 and 1.
                Items of weight 0 do not count even if they are not finite; their gradient may still be, as in
                any masked sum (mask the input of a logarithm, not its output).

        >>> import numpy as np
        >>> Mean.of(np.array([1.0, 2.0, np.nan]), where=np.array([True, True, False])).value
        np.float64(1.5)
        """
        if not hasattr(values, "shape") or not hasattr(values, "sum"):
            raise LossTypeError(f"values must be an array of losses, got {type(values).__name__}")
        if where is None:
            return cls(_wide_sum(values), math.prod(values.shape))
        if not hasattr(where, "shape"):
            raise LossTypeError(f"where must be an array in the shape of the values, got {type(where).__name__}")
        if tuple(where.shape) != tuple(values.shape):
            raise LossTypeError(
                f"where has shape {tuple(where.shape)}, values have {tuple(values.shape)}: "
                "give each item its own entry in the mask"
            )
        kept = _namespace(values).where(where != 0, values, 0)
        return cls(_wide_sum(kept * where), _wide_sum(where))

    @property
    def value(self) -> Any:
        """`total / count`."""
        return self.total / self.count

    def _with_total(self, total: Any) -> "Mean":
        return Mean(total, self.count)


class Sum(_Term):
    """A loss that adds up over the rows of a batch and is not divided by anything.

    >>> (0.01 * Sum(3.0)).value
    0.03
    """

    __slots__ = ("total",)
    __match_args__ = ("total",)

    def __init__(self, total: Any) -> None:
        self.total = total

    def __repr__(self) -> str:
        return f"Sum(total={self.total!r})"

    @property
    def value(self) -> Any:
        """`total`."""
        return self.total

    def _with_total(self, total: Any) -> "Sum":
        return Sum(total)


def _namespace(array: Any) -> Any:
    """The library that an array belongs to, without importing one."""
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules["torch"]


def _wide_sum(array: Any) -> Any:
    """The sum, in float32 where the array has 16 bits: there, sums stop growing."""
    if str(array.dtype).endswith("float16"):
        return array.sum(dtype=_namespace(array).float32)
    return array.sum()
