"""A whole training run: one step per batch, whether the loader yields batches or their pieces."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .._errors import BatchError, OptionError
from .._plan import positive_integer
from .._terms import described
from ._accumulator import Accumulator, Optimizers
from ._auto import MicroBatchSize
from ._loss import CountFunction, LossFunction
from ._model import Model, require
from ._options import RunOptions
from ._result import Result
from ._step import Step
from ._window import windows

Precision = Literal["fp32", "bf16", "fp16"]

_CUTS = ("micro_batch_size", "num_micro_batches", "micro_batch_tokens", "lengths", "memory")
"""Options that cut a whole batch."""

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class History:
    """What a training run came to.

    Args:
        step_losses: the loss of each optimizer step's batch.
        epoch_losses: the mean loss of each epoch, weighted by what the losses were divided by (rows where there
            are several terms).
        steps: how many optimizer steps were taken.
    """

    step_losses: list[float] = field(default_factory=list)
    epoch_losses: list[float] = field(default_factory=list)
    steps: int = 0


def train(
    model: nn.Module | Iterable[nn.Module] | Iterable[Tensor],
    loader: Iterable[Any],
    optimizer: Optimizers,
    loss_fn: LossFunction,
    *,
    epochs: int = 1,
    accumulation_steps: int = 1,
    micro_batch_size: MicroBatchSize = None,
    memory: int | str | None = None,
    precision: Precision | None = None,
    max_norm: float | None = None,
    scaler: Any = None,
    scheduler: Any = None,
    progress: bool = True,
    counts: CountFunction | None = None,
    **options: Unpack[RunOptions],
) -> History:
    """Train a model; modules stay in the mode that they are in.

    Args:
        model: as for `Accumulator`.
        loader: yields whole batches, or micro-batches if `accumulation_steps` is given. Read once per epoch.
        optimizer: one or several.
        loss_fn: as for `Accumulator.backward`.
        epochs: how often the loader is read.
        accumulation_steps: the number of the loader's micro-batches that make a batch; an epoch's last batch may
            hold fewer.
        micro_batch_size: cut the loader's batches into pieces of at most that many rows, instead; or "auto".
        memory: the budget for "auto", as for `Accumulator`.
        precision: "bf16" or "fp16" run the loss function under autocast; "fp16" with a `GradScaler`.
        max_norm: clip each batch's gradient to this norm.
        scaler: a `GradScaler` of your own.
        scheduler: one or several, stepped once per optimizer step.
        progress: show a bar, if there is a terminal.
        counts: as for `Accumulator.step`.
        options: others of `Accumulator`, such as `batch_norm="micro"`. Those that cut want whole batches.

    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> data = torch.utils.data.TensorDataset(torch.randn(50, 4), torch.randn(50, 1))
    >>> loader = torch.utils.data.DataLoader(data, batch_size=8)
    >>> history = train(model, loader, optimizer, lambda b: (model(b[0]) - b[1]).square().mean(), accumulation_steps=4)
    >>> history.steps, len(history.epoch_losses)
    (2, 1)
    """
    positive_integer("epochs", epochs)
    positive_integer("accumulation_steps", accumulation_steps)
    given: dict[str, Any] = {"micro_batch_size": micro_batch_size, "memory": memory, **options}
    cuts = [name for name in _CUTS if given.get(name) is not None]
    if accumulation_steps > 1 and cuts:
        raise OptionError(
            f"both accumulation_steps={accumulation_steps} and {cuts[0]}={described(given[cuts[0]])} were given: the "
            "loader yields either micro-batches, to be put together, or whole batches, to be cut"
        )
    if precision not in (None, "fp32", *_AUTOCAST):
        raise OptionError(f'precision must be "fp32", "bf16" or "fp16", got {precision!r}')
    trained = Model(model)
    parameters = require(trained.parameters())
    accumulator = Accumulator(trained.members, **given)
    if precision == "fp16" and scaler is None:
        scaler = torch.amp.GradScaler(parameters[0].device.type)
    loss_fn = _under_autocast(loss_fn, parameters[0].device.type, precision)
    Step(optimizer, max_norm, scheduler, scaler).zero(parameters)

    history = History()
    for epoch in range(1, epochs + 1):
        batches = loader if cuts else windows(loader, accumulation_steps)
        results = _Epoch()
        with tqdm(
            batches,
            desc=f"epoch {epoch}/{epochs}",
            total=_length(loader, accumulation_steps),
            unit="step",
            disable=None if progress else True,  # None: silent unless there is a terminal
        ) as bar:
            for batch in bar:
                result = accumulator.step(
                    loss_fn,
                    batch,
                    optimizer,
                    counts=counts,
                    max_norm=max_norm,
                    scaler=scaler,
                    scheduler=scheduler,
                )
                results.add(result)
                if not bar.disable:
                    bar.set_postfix_str(f"loss {result.loss.item():.4g}", refresh=False)
        if not results.batches:
            again = "" if epoch == 1 else f" in epoch {epoch}: it must be possible to read it again"
            raise BatchError(f"the loader yielded nothing{again}")
        results.close(history)
    return history


class _Epoch:
    """The losses of an epoch, left on their device until it ends."""

    def __init__(self) -> None:
        self.batches = 0
        self._losses: list[Tensor] = []
        self._weights: list[float] = []

    def add(self, result: Result) -> None:
        self.batches += 1
        if result.stepped:
            self._losses.append(result.loss)
            self._weights.append(float((result.rows or 1) if isinstance(result.count, dict) else result.count))

    def close(self, history: History) -> None:
        losses = torch.stack(self._losses).tolist() if self._losses else []
        weighted = sum(loss * weight for loss, weight in zip(losses, self._weights, strict=True))
        history.step_losses += losses
        history.epoch_losses.append(weighted / sum(self._weights) if losses else math.nan)
        history.steps += len(losses)


def _under_autocast(loss_fn: LossFunction, device_type: str, precision: Precision | None) -> LossFunction:
    if precision not in _AUTOCAST:
        return loss_fn

    def in_precision(piece: Any) -> Any:
        with torch.autocast(device_type, dtype=_AUTOCAST[precision]):
            return loss_fn(piece)

    return in_precision


def _length(loader: Iterable[Any], accumulation_steps: int) -> int | None:
    """How many steps an epoch takes, for loaders that know; data sets that stream do not."""
    try:
        return -(-len(loader) // accumulation_steps)  # type: ignore[arg-type]
    except TypeError:
        return None
