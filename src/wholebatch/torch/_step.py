"""The step at the end of a batch: one for each optimizer, one for each scheduler, one clip."""

import functools
import inspect
import math
import numbers
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .._errors import OptionError, OptionTypeError
from ._finalise import finalise
from ._gradients import norm_of
from ._host import read_once
from ._sums import GradientSums


class Step:
    """What `.finish` was asked to do with the gradient; checked before any work is done.

    Args:
        optimizer: one, several, or None to leave the gradient in `.grad`.
        max_norm: the norm to clip to, if any.
        scheduler: one, several or None.
        scaler: a `GradScaler`, which decides whether there is a step; or None.
    """

    def __init__(self, optimizer: Any, max_norm: float | None, scheduler: Any, scaler: Any) -> None:
        self.optimizers = _several("optimizer", optimizer, "step", "zero_grad")
        self._schedulers = _several("scheduler", scheduler, "step")
        if scaler is not None:
            _require("scaler", scaler, "a GradScaler", "scale", "unscale_", "step", "update", "is_enabled")
        self.scaler: Any = scaler if scaler is not None and scaler.is_enabled() else None
        self._unscaled: list[Any] = []
        self._overflow = False
        self.max_norm = max_norm
        if max_norm is not None and not isinstance(max_norm, numbers.Real):
            raise OptionTypeError(f"max_norm must be a positive number, got {max_norm!r}")
        if max_norm is not None and not max_norm > 0:  # infinity measures the norm and clips nothing
            raise OptionError(f"max_norm must be a positive number, got {max_norm}")
        if self._schedulers and not self.optimizers:
            raise OptionError("a scheduler was given without an optimizer: it is stepped only after one")
        if self.scaler is not None and max_norm is not None and not self.optimizers:
            raise OptionError("max_norm with a scaler needs the optimizer: gradients are unscaled by it, then clipped")
        for optimizer in self.optimizers:
            _refuse_closure(optimizer.__class__)
        if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self._schedulers):
            raise OptionError(
                "ReduceLROnPlateau follows a validation loss: step it yourself, scheduler.step(validation_loss)"
            )

    def require_optimizer(self) -> "Step":
        """Itself, unless there is nothing to step."""
        if not self.optimizers:
            raise OptionTypeError("optimizer must be a torch optimizer or a sequence of them, got none")
        return self

    def unscale_and_clip(self, sums: GradientSums) -> Tensor | None:
        """With a scaler, gradients have their true size only now. One overflow anywhere is an overflow of the batch."""
        for optimizer in self.optimizers:
            if _gradients(optimizer):  # a scaler cannot judge what is not there
                self.scaler.unscale_(optimizer)
                self._unscaled.append(optimizer)
        largest = norm_of([gradient for optimizer in self._unscaled for gradient in _gradients(optimizer)], math.inf)
        self._overflow = not bool(read_once([largest])[0].isfinite().all())
        return finalise(sums, 1, self.max_norm)

    def abandon(self) -> None:
        """After a failure: the scaler has judged gradients that no longer exist, and has to forget that."""
        if self._unscaled:
            state = self.scaler.state_dict()
            self.scaler.update()
            self.scaler.load_state_dict(state)
            self._unscaled = []

    def take(self, parameters: list[Tensor]) -> bool:
        """Step once and zero the gradients; returns whether a step was taken."""
        stepped = bool(self.optimizers) and not self._overflow
        if self.scaler is None:
            for optimizer in self.optimizers:
                optimizer.step()
        else:
            for optimizer in self._unscaled if stepped else []:
                self.scaler.step(optimizer)
            if self._unscaled:
                self.scaler.update()
        self.zero(parameters)
        if stepped:
            for scheduler in self._schedulers:
                scheduler.step()
        return stepped

    def zero(self, parameters: list[Tensor]) -> None:
        """Zero the gradients that a step would have used."""
        if self.optimizers:
            for parameter in parameters:
                parameter.grad = None
            for optimizer in self.optimizers:
                optimizer.zero_grad()


def _gradients(optimizer: Any) -> list[Tensor]:
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter.grad for parameter in every if parameter.grad is not None]


def loss_scale(scaler: Any, device: torch.device) -> Tensor:
    """What a scaler multiplies a loss by, without waiting for a device."""
    scaled: Tensor = scaler.scale(torch.ones((), device=device))
    return scaled


@functools.cache
def _refuse_closure(kind: Any) -> None:
    step = getattr(kind, "step", None)  # an object that stands in for an optimizer may not have one on its class
    parameters = [] if step is None else list(inspect.signature(step).parameters.values())[1:]
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
        raise OptionError(
            f"{kind.__name__} evaluates the loss several times per step, through a closure: call its step yourself, "
            "with a closure that zeroes the gradients and returns accumulator.backward(loss_fn, batch).loss"
        )


def _several(name: str, given: Any, *methods: str) -> list[Any]:
    if given is None:
        return []
    several = list(given) if isinstance(given, list | tuple) else [given]
    for one in several:
        _require(name, one, f"a torch {name} or a sequence of them", *methods)
    return several


def _require(name: str, given: Any, wanted: str, *methods: str) -> None:
    if not all(callable(getattr(given, method, None)) for method in methods):
        raise OptionTypeError(f"{name} must be {wanted}, got {type(given).__name__}")
