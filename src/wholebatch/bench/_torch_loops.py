"""Who takes part in torch, each written the way its documentation says.

A contender is a function of the problem, the model, the optimizer and the rows of a piece, and returns a step: a
function of a batch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..torch import Accumulator
from ._case import OURS, UNSPLIT
from ._torch_problems import Batch, Problem

Step = Callable[[Batch], None]

MAX_NORM = 1.0


def _pieces(batch: Batch, size: int) -> Iterator[Batch]:
    return zip(*(tensor.split(size) for tensor in batch), strict=True)


def _take_step(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if problem.steps:
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    optimizer.zero_grad()


def _plain_loop(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, size: int) -> Step:
    count = problem.rows // size

    def step(batch: Batch) -> None:
        for piece in _pieces(batch, size):
            (problem.by_hand(model, piece, batch, count) / count).backward()
        _take_step(problem, model, optimizer)

    return step


def _mean_of_means(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, size: int) -> Step:
    """Wrong for pieces of unequal counts: here so that the check before timing has something to find."""
    count = problem.rows // size

    def step(batch: Batch) -> None:
        for piece in _pieces(batch, size):
            loss = problem.loss(model, piece)
            (loss.total / loss.count / count).backward()
        _take_step(problem, model, optimizer)

    return step


def _unsplit(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, size: int) -> Step:
    def step(batch: Batch) -> None:
        problem.by_hand(model, batch, batch, 1).backward()
        _take_step(problem, model, optimizer)

    return step


def _accelerate(problem: Problem, model: nn.Module, optimizer: Any, size: int) -> Step:
    from accelerate import Accelerator

    count = problem.rows // size
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=count)
    prepared, optimizer = accelerator.prepare(model, optimizer)

    def step(batch: Batch) -> None:
        for piece in _pieces(batch, size):
            with accelerator.accumulate(prepared):
                accelerator.backward(problem.by_hand(prepared, piece, batch, count))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()

    return step


def _fabric(problem: Problem, model: nn.Module, optimizer: Any, size: int) -> Step:
    from lightning.fabric import Fabric

    count = problem.rows // size
    double = torch.get_default_dtype() == torch.float64
    fabric = Fabric(accelerator="cpu", devices=1, precision="64-true" if double else "32-true")
    prepared, optimizer = fabric.setup(model, optimizer)

    def step(batch: Batch) -> None:
        for i, piece in enumerate(_pieces(batch, size), start=1):
            accumulating = i < count
            with fabric.no_backward_sync(prepared, enabled=accumulating):
                fabric.backward(problem.by_hand(prepared, piece, batch, count) / count)
        fabric.clip_gradients(prepared, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ours(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, size: int) -> Step:
    accumulator = Accumulator(model, **problem.options(size))

    def loss_fn(piece: Batch) -> Any:
        return problem.loss(model, piece)

    def step(batch: Batch) -> None:
        accumulator.step(loss_fn, batch, optimizer, max_norm=MAX_NORM)

    def gradients(batch: Batch) -> None:
        accumulator.backward(loss_fn, batch)
        optimizer.zero_grad()

    return step if problem.steps else gradients


LOOPS = {
    "plain loop": _plain_loop,
    "mean of means": _mean_of_means,
    UNSPLIT: _unsplit,
    "Accelerate": _accelerate,
    "Fabric": _fabric,
    OURS: _ours,
}
