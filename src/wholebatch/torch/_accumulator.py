"""The whole batch's gradient, from the first piece to the step.

`.backward` is `.add` per piece and `.finish`; `.step` is `.backward` and the optimizer.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._errors import BatchError, OptionError
from .._plan import check_sizes
from ._batch import OpenBatch
from ._cut import Cut, to_device
from ._loss import read_counts
from ._model import Model, only_device
from ._result import Result
from ._state import Snapshot
from ._step import Step
from ._tokens import ignored_labels

LossFunction = Callable[[Any], Any]
CountFunction = Callable[[Any], Any]


class Accumulator:
    """Computes the gradient of a whole batch on the memory of one of its pieces.

    Args:
        model: a module, several modules, or an iterable of parameters.
        micro_batch_size: the most rows that a piece may have; pieces are balanced.
        num_micro_batches: the number of pieces, instead. Without either, the batch is one piece.
        on_nonfinite: what a loss, count or gradient norm that is not finite does: "raise" an error that names
            the piece, "skip" the step, or "keep" going without looking.

    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> accumulator = Accumulator(model, micro_batch_size=16)
    >>> x, y = torch.randn(50, 4), torch.randn(50, 1)
    >>> def loss_fn(piece):
    ...     x, y = piece
    ...     return torch.nn.functional.mse_loss(model(x), y)
    >>> result = accumulator.step(loss_fn, (x, y), optimizer, max_norm=1.0)
    >>> result.num_micro_batches, result.stepped
    (4, True)
    """

    skipped: int
    """How many batches ended without a step: nothing counted, or not finite and `on_nonfinite="skip"`."""

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module] | Iterable[Tensor],
        *,
        micro_batch_size: int | None = None,
        num_micro_batches: int | None = None,
        on_nonfinite: Literal["raise", "skip", "keep"] = "raise",
    ) -> None:
        check_sizes(micro_batch_size, num_micro_batches)
        if on_nonfinite not in ("raise", "skip", "keep"):
            raise OptionError(f'on_nonfinite must be "raise", "skip" or "keep", got {on_nonfinite!r}')
        self._model = Model(model)
        self._micro_batch_size = micro_batch_size
        self._num_micro_batches = num_micro_batches
        self._on_nonfinite = on_nonfinite
        self._open: OpenBatch | None = None
        self.judged = False  # by check, which wants to see what a wrong loss would do
        self.skipped = 0

    def backward(self, loss_fn: LossFunction, batch: Any, *, counts: CountFunction | None = None) -> Result:
        """Add the whole batch's gradient to `.grad`, as `loss_fn(batch).backward()` would.

        Args:
            loss_fn: takes a piece in the structure of the batch; returns a scalar (a mean over its rows), a
                `Mean`, a `Sum`, a mapping of these, or a pair of one of these and a mapping of metrics.
            batch: tensors in tuples, lists, dicts, dataclasses or other mappings, cut along their leading
                axis; or a `Window`, which is cut already.
            counts: takes a piece, returns the count of each term by name; needed where several terms of the
                loss have counts of their own.
        """
        self._add_all(loss_fn, batch, counts)
        return self.finish()

    def step(
        self,
        loss_fn: LossFunction,
        batch: Any,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        counts: CountFunction | None = None,
        max_norm: float | None = None,
        scheduler: Any = None,
    ) -> Result:
        """One optimizer step with the gradient of the whole batch; gradients are zeroed afterwards.

        Args:
            loss_fn: as for `.backward`.
            batch: as for `.backward`.
            optimizer: one or several.
            counts: as for `.backward`.
            max_norm: clip the whole batch's gradient, once, to this norm.
            scheduler: stepped once, if the optimizer was.
        """
        step = Step(optimizer, max_norm, scheduler)
        self._add_all(loss_fn, batch, counts)
        return self._finish(step)

    def add(self, loss: Any, *, rows: int | None = None) -> None:
        """Add one piece's loss, in a loop that exists already; runs its backward.

        Args:
            loss: what a loss function may return.
            rows: rows of the piece, needed for a scalar loss.
        """
        if self._open is None:
            self._open = OpenBatch(self._model.parameters())
        try:
            self._open.add(loss, rows)
        except BaseException:
            self.discard()
            raise

    def finish(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        max_norm: float | None = None,
        scheduler: Any = None,
    ) -> Result:
        """Turn what was added into the whole batch's gradient; with an optimizer, take its step.

        Args:
            optimizer: as for `.step`; without one, the gradient is left in `.grad`.
            max_norm: as for `.step`.
            scheduler: as for `.step`.
        """
        return self._finish(Step(optimizer, max_norm, scheduler))

    def discard(self) -> None:
        """Forget what was added: `.grad` is as it was before the first piece."""
        batch, self._open = self._open, None
        if batch is not None:
            batch.undo()

    def _add_all(self, loss_fn: LossFunction, batch: Any, counts: CountFunction | None) -> None:
        if self._open is not None:
            raise BatchError("pieces added with .add are still pending: call .finish() or .discard() first")
        pieces = Cut(batch, self._micro_batch_size, self._num_micro_batches)
        parameters = self._model.parameters()
        device = only_device(parameters)
        self._open = OpenBatch(
            parameters,
            snapshot=Snapshot(self._model),
            rows=pieces.rows,
            num_micro_batches=len(pieces),
            ignored_labels=None if self.judged else ignored_labels(batch),
        )
        try:
            if counts is not None:
                self._open.declare_counts([read_counts(counts(piece)) for piece, _ in pieces])
            for piece, rows in pieces:
                self._open.add(loss_fn(to_device(piece, device)), rows)
        except BaseException:
            self.discard()
            raise

    def _finish(self, step: Step) -> Result:
        batch = self._open
        if batch is None:
            raise BatchError("nothing was added: call .add(loss) for each piece before .finish()")
        try:
            result, verdict = batch.close(step.max_norm, self._on_nonfinite)
        except BaseException:
            self.discard()
            raise
        self._open = None
        if verdict.nonfinite is not None or (step.optimizers and verdict.counted_nothing):
            self.skipped += 1
            batch.sums.restore()
            step.zero(self._model.parameters())
            return result
        batch.sums.commit()
        return dataclasses.replace(result, stepped=step.take(self._model.parameters()))


def backward(
    model: nn.Module | Iterable[nn.Module] | Iterable[Tensor],
    loss_fn: LossFunction,
    batch: Any,
    *,
    counts: CountFunction | None = None,
    **options: Any,
) -> Result:
    """Add the whole batch's gradient to `.grad`, in place of `loss_fn(batch).backward()`.

    Args:
        model: as for `Accumulator`.
        loss_fn: as for `Accumulator.backward`.
        batch: as for `Accumulator.backward`.
        counts: as for `Accumulator.backward`.
        options: those of `Accumulator`, such as `micro_batch_size=16`.

    >>> model = torch.nn.Linear(4, 1)
    >>> x, y = torch.randn(50, 4), torch.randn(50, 1)
    >>> def loss_fn(piece):
    ...     x, y = piece
    ...     return torch.nn.functional.mse_loss(model(x), y)
    >>> loss = backward(model, loss_fn, (x, y), micro_batch_size=16).loss
    """
    return Accumulator(model, **options).backward(loss_fn, batch, counts=counts)
