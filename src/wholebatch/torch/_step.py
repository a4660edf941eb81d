"""The step at the end of a batch: one for each optimizer, one for each scheduler, one clip."""

import math
import numbers
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from .._errors import OptionError, OptionTypeError


class Step:
    """What `.finish` was asked to do with the gradient; checked before any work is done.

    Args:
        optimizer: one, several, or None to leave the gradient in `.grad`.
        max_norm: the norm to clip to, if any.
        scheduler: one, several or None.
    """

    def __init__(self, optimizer: Any, max_norm: float | None, scheduler: Any) -> None:
        self.optimizers = _several("optimizer", optimizer, "step", "zero_grad")
        self._schedulers = _several("scheduler", scheduler, "step")
        self.max_norm = max_norm
        if self._schedulers and not self.optimizers:
            raise OptionError("a scheduler was given without an optimizer: it is stepped only after one")
        if max_norm is not None and not isinstance(max_norm, numbers.Real):
            raise OptionTypeError(f"max_norm must be a positive number, got {max_norm!r}")
        if max_norm is not None and not (max_norm > 0 and math.isfinite(max_norm)):
            raise OptionError(f"max_norm must be a positive number, got {max_norm}")

    def take(self, parameters: Iterable[Tensor]) -> bool:
        """Step once and zero the gradients; returns whether there was anything to step."""
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero(parameters)
        for scheduler in self._schedulers:
            scheduler.step()
        return bool(self.optimizers)

    def zero(self, parameters: Iterable[Tensor]) -> None:
        """Zero the gradients that a step would have used."""
        if self.optimizers:
            for parameter in parameters:
                parameter.grad = None
            for optimizer in self.optimizers:
                optimizer.zero_grad()


def _several(name: str, given: Any, *methods: str) -> list[Any]:
    if given is None:
        return []
    several = list(given) if isinstance(given, list | tuple) else [given]
    for one in several:
        if not all(callable(getattr(one, method, None)) for method in methods):
            raise OptionTypeError(f"{name} must be a torch {name} or a sequence of them, got {type(one).__name__}")
    return several
