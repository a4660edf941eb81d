"""Rehearsal: the step of a batch with stand-ins for all tensors, to see what memory it takes.

The pieces go through the library's own rooms, so that sums in place, sums in float32 and the optimizer's temporaries
are counted as they are. Only the verdict is left out, since there are no values to judge.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .._errors import OptionError, OptionTypeError, PlanError
from . import _statistics as statistics
from ._accumulator import Accumulator
from ._agree import Share
from ._lifetimes import Lifetimes, Timeline
from ._loss import CountFunction, LossFunction
from ._model import Model
from ._options import SumOptions
from ._peers import Alone
from ._processes import Sync
from ._stand_in import StandIns, stand_in_batch, stand_in_optimizer
from ._step import Step
from ._tree import tensors

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"

AnOptimizer = Optimizer | Callable[[list[Tensor]], Optimizer]


class Rehearsal:
    """A model, its optimizer and a batch, of which steps with any number of rows can be rehearsed. To be entered.

    Args:
        model: the model.
        loss_fn: the loss function.
        batch: a batch, for the structure, the dtypes and the devices.
        optimizer: one, several, or a function that makes one from parameters; or None.
        counts: as for `Accumulator.backward`.
        options: those of `Accumulator`.
    """

    state: int
    """The bytes of the optimizer's state."""

    gradients: int
    """The bytes of all gradients."""

    peak_of_step: int
    """The most bytes that are held while the optimizer steps."""

    besides: int
    """The bytes of the batch, and of what gradients are sent from."""

    def __init__(
        self,
        model: Model,
        loss_fn: LossFunction,
        batch: Any,
        optimizer: AnOptimizer | Sequence[Optimizer] | None,
        counts: CountFunction | None,
        options: SumOptions,
    ) -> None:
        self._loss_fn, self._batch, self._optimizer, self._counts = loss_fn, batch, optimizer, counts
        self._options: dict[str, Any] = {**options, "batch_norm": "micro"}
        self._device = _device(model, batch)
        self._stand_ins = StandIns(model, self._device)
        self._lifetimes = Lifetimes(self._device)
        self._stack = ExitStack()
        self._stepped = False
        self.state = self.gradients = self.peak_of_step = 0
        beside_the_model = [t for _, t in tensors(batch) if t.device == self._device or t.device.type == "meta"]
        self.besides = sum(tensor.nbytes for tensor in beside_the_model) + _buckets(model)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._model = stack.enter_context(self._stand_ins)
            self._lifetimes.note(PARAMETERS, self._stand_ins)
            self._optimizers = self._stand_ins_for(self._optimizer)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def step(self, rows: int, pieces: int) -> Timeline:
        """What a batch of that many rows does to the memory until the optimizer steps, its state not counted."""
        batch = stand_in_batch(self._batch, rows, self._device)
        self._lifetimes.ignore(tensor for _, tensor in tensors(batch))
        accumulator = _Rehearsing(self._model.members, num_micro_batches=pieces, **self._options)
        try:
            with self._lifetimes:
                self._lifetimes.start(without=OPTIMIZER)
                accumulator.sum_up(self._loss_fn, batch, self._counts, self._lifetimes)
                timeline = self._lifetimes.stop()
                if not self._stepped:
                    self._take_the_step()
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise PlanError(
                f"planning has no values, and the loss function or the optimizer needs some: {error.func}. What is "
                "read on the host (.item(), .tolist(), if tensor: ...) or decides a shape (a boolean mask as an index, "
                "nonzero, unique) cannot be followed; choose the size by trying instead"
            ) from error
        finally:
            accumulator.clear()
        return timeline

    def _take_the_step(self) -> None:
        """Once, because it is the same whatever the rows."""
        self._stepped = True
        self.gradients = self._lifetimes.bytes_of(GRADIENTS)
        self._lifetimes.start()
        for optimizer in self._optimizers:
            optimizer.step()
        self.peak_of_step = self._lifetimes.stop().peak()
        self._lifetimes.note(OPTIMIZER, _state(self._optimizers))
        self.state = self._lifetimes.bytes_of(OPTIMIZER)

    def _stand_ins_for(self, given: AnOptimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
        """Optimizers of the stand-ins, from those that were given or that a function makes."""
        if callable(given) and not isinstance(given, Optimizer):
            made = given(self._model.parameters())
            optimizers = list(made) if isinstance(made, list | tuple) else [made]
        else:
            several = [] if given is None else [given] if not isinstance(given, Sequence) else list(given)
            if not all(isinstance(one, Optimizer) for one in several):
                raise OptionTypeError(
                    "optimizer must be a torch optimizer, a sequence of them, or a function that makes one from a list "
                    f"of parameters, such as torch.optim.AdamW; got {type(given).__name__}"
                )
            optimizers = [stand_in_optimizer(one, self._stand_ins, self._device) for one in several]
        Step(optimizers, None, None, None)  # has something to say about those that evaluate the loss themselves
        known = {id(parameter) for parameter in self._model.parameters()}
        for optimizer in optimizers:
            if not any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
                raise OptionError(f"the optimizer ({type(optimizer).__name__}) holds none of the model's parameters")
        self._lifetimes.note(OPTIMIZER, _state(optimizers))
        return optimizers


class _Rehearsing(Accumulator):
    """An accumulator for stand-ins, which have no values to judge or to bring back."""

    _adopted: Sequence[tuple[Tensor, Tensor | None]] = ()

    def sum_up(self, loss_fn: LossFunction, batch: Any, counts: CountFunction | None, lifetimes: Lifetimes) -> None:
        """Everything until the gradient is in `.grad`."""
        self._add_all(loss_fn, batch, counts, Step(None, None, None, None))
        open_batch, self._open = self._open, None
        assert open_batch is not None
        self._adopted = open_batch.sums.adopted
        lifetimes.note(GRADIENTS, itertools.chain(*open_batch.sums.gradients()))
        open_batch.sum_up()
        open_batch.commit()
        parameters = self._model.parameters()
        lifetimes.note(GRADIENTS, [parameter.grad for parameter in parameters if parameter.grad is not None])

    def clear(self) -> None:
        """Leave no gradients: neither the stand-ins' nor any of tensors that the loss reaches besides."""
        for parameter in self._model.parameters():
            parameter.grad = None
        for leaf, before in self._adopted:
            leaf.grad = before

    def discard(self) -> None:
        open_batch, self._open = self._open, None
        if open_batch is not None:
            open_batch.sums.restore()

    def _processes(self, sync: Sync) -> Alone:
        return Alone()

    def _statistics_to_pool(self, whole: Share, processes: Alone) -> dict[str, Any]:
        """What statistics of the batch mean for the gradient is not the question here."""
        return statistics.keepers(self._model) if whole.pieces != 1 else {}


def _device(model: Model, batch: Any) -> torch.device:
    """The one whose memory is planned; for what is on the meta device, where the batch is, or the host."""
    real = {parameter.device for parameter in model.parameters() if parameter.device.type != "meta"}
    if len(real) > 1:
        raise PlanError(f"the model is on several devices ({', '.join(sorted(map(str, real)))}): plan one at a time")
    of_batch = [tensor.device for _, tensor in tensors(batch) if tensor.device.type != "meta"]
    return next(iter([*real, *of_batch]), torch.device("cpu"))


def _buckets(model: Model) -> int:
    """The bytes that DDP modules copy gradients to, to send them."""
    modules = [module for module in model.named_modules().values() if isinstance(module, DistributedDataParallel)]
    return sum(p.nbytes for module in modules for p in module.parameters() if p.requires_grad)


def _state(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [tensor for one in optimizers for state in one.state.values() for _, tensor in tensors(state)]
