"""The whole batch's gradient, from the first piece to the step.

`.backward` is `.add` per piece and `.finish`; `.step` is `.backward` and the optimizer.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from .._errors import BatchError, OptionError, OptionTypeError
from .._plan import check_sizes, positive_integer
from . import _statistics as statistics
from ._agree import Share
from ._auto import MicroBatchSize, auto_size
from ._batch import OpenBatch, summed_counts
from ._cut import Cut
from ._in_place import WORTH_IT, InPlace, summing_in_place
from ._loss import CountFunction, LossFunction, read_counts
from ._model import Model, only_device, require
from ._options import BatchNorm, OnNonfinite, Options, check_options
from ._peers import Alone
from ._processes import Sync, processes_of
from ._regroup import ByLength, LengthFunction, Regrouped, TrimFunction
from ._result import Result
from ._state import Snapshot
from ._step import Step
from ._sums import SumDtype
from ._tokens import ignored_labels
from ._window import Window

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class Accumulator:
    """Computes the gradient of a whole batch on the memory of one of its pieces.

    Args:
        model: a module, several modules, or an iterable of parameters. With `DistributedDataParallel` or `fully_shard`
            the batch is that of all processes, each of which holds some of its rows, or none.
        micro_batch_size: the most rows that a piece may have; pieces are balanced. A `Window` is cut already, and
            stays as it is. "auto" finds the size with the first batch of `.backward` or `.step`, and halves it where
            memory runs out.
        num_micro_batches: the number of pieces, instead. Without any of these, the batch is one piece.
        micro_batch_tokens: the most tokens that a piece may have, which is its rows times the longest of them.
        lengths: takes a batch, returns each row's length. Rows are then sorted by length, and right padding beyond the
            longest row of a piece is trimmed, from axis 1 of all tensors that have the padded width there.
        trim: takes a piece and its longest length, returns the piece to compute; for padding that is elsewhere.
        memory: the budget that "auto" finds the size by, in bytes or such as "24GiB", with `plan`; by itself it means
            "auto". Without one it is what a CUDA device has free; on the host the whole batch is tried first.
        accum_dtype: what gradients are summed in where there are several pieces: "auto" is float32 for 16-bit
            gradients and a gradient's own dtype for all others. They are rounded once, after clipping.
        in_place: whether `.backward` and `.step` sum the weight gradients of linear layers and embeddings straight into
            `.grad`, with the same result up to rounding: "auto" where that is faster, which is for large weights.
        batch_norm: "refuse" to cut a batch that BatchNorm sees in training mode, or accept normalisation by
            "micro"-batch, with running statistics that follow the whole batch, that of all processes.
        on_nonfinite: what a loss, count or gradient norm that is not finite does: "raise" an error that names
            the piece, "skip" the step, or "keep" going without looking. With a scaler, the scaler decides.
        sync: when a model of several processes sends gradients: "once" per batch, after its last piece; with DDP, in
            "overlap" with the backward of the last piece; with `fully_shard` also for "every" piece, which sends more
            and holds less.

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
    """How many batches took no step: nothing counted, `on_nonfinite="skip"`, or an overflow that a scaler found."""

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module] | Iterable[Tensor],
        *,
        micro_batch_size: MicroBatchSize = None,
        num_micro_batches: int | None = None,
        micro_batch_tokens: int | None = None,
        lengths: LengthFunction | None = None,
        trim: TrimFunction | None = None,
        memory: int | str | None = None,
        accum_dtype: SumDtype = "auto",
        in_place: InPlace = "auto",
        batch_norm: BatchNorm = "refuse",
        on_nonfinite: OnNonfinite = "raise",
        sync: Sync = "once",
    ) -> None:
        self._auto = auto_size(
            micro_batch_size, memory, num_micro_batches=num_micro_batches, micro_batch_tokens=micro_batch_tokens
        )
        size = None if self._auto else micro_batch_size
        self._micro_batch_size, self._num_micro_batches = check_sizes(size, num_micro_batches)
        self._by_length = ByLength.of(lengths, micro_batch_tokens, trim, (micro_batch_size, num_micro_batches))
        check_options(accum_dtype, in_place, batch_norm, on_nonfinite, sync)
        self._model = Model(model)
        self._sync: Sync = sync
        self._accum_dtype = accum_dtype
        self._in_place = in_place
        self._batch_norm = batch_norm
        self._on_nonfinite = on_nonfinite
        self._open: OpenBatch | None = None
        self._scaler: Any = None  # the last .finish's, so that the next .add scales before it is told
        self._warned = False
        self.skipped = 0

    @property
    def micro_batch_size(self) -> int | None:
        """The most rows of a piece, as given or as "auto" has found it so far; None for the whole batch.

        Set it to go on with the size of a run before: the last bits of a sum depend on how it is cut.
        """
        return self._micro_batch_size if self._auto is None else self._auto.rows

    @micro_batch_size.setter
    def micro_batch_size(self, rows: int) -> None:
        if self._by_length is not None and self._by_length.budget is not None:
            raise OptionError(f"micro_batch_tokens={self._by_length.budget} decides how many rows a piece has")
        self._micro_batch_size, _ = check_sizes(rows, self._num_micro_batches)
        if self._auto is not None:
            self._auto.begin_with(rows)

    def backward(
        self, loss_fn: LossFunction, batch: Any, *, counts: CountFunction | None = None, scaler: Any = None
    ) -> Result:
        """Add the whole batch's gradient to `.grad`, as `loss_fn(batch).backward()` would.

        Args:
            loss_fn: takes a piece in the structure of the batch; returns a scalar (a mean over its rows), a
                `Mean`, a `Sum`, a mapping of these, or a pair of one of these and a mapping of metrics.
            batch: tensors in tuples, lists, dicts, dataclasses or other mappings, cut along their leading
                axis; or a `Window`, which is cut already.
            counts: takes a piece, returns the count of each term by name; needed where several terms of the
                loss have counts of their own.
            scaler: a `GradScaler`; the gradient is left scaled, as `scaler.scale(loss).backward()` leaves it.
        """
        return self._run(loss_fn, batch, counts, Step(None, None, None, scaler))

    def step(
        self,
        loss_fn: LossFunction,
        batch: Any,
        optimizer: Optimizers,
        *,
        counts: CountFunction | None = None,
        max_norm: float | None = None,
        scaler: Any = None,
        scheduler: Any = None,
    ) -> Result:
        """One optimizer step with the gradient of the whole batch; gradients are zeroed afterwards.

        Args:
            loss_fn: as for `.backward`.
            batch: as for `.backward`.
            optimizer: one or several.
            counts: as for `.backward`.
            max_norm: clip the whole batch's gradient, once, to this norm.
            scaler: a `GradScaler`; it unscales, decides whether there is a step, and is updated, once.
            scheduler: one or several, stepped once, if the optimizer was.
        """
        return self._run(loss_fn, batch, counts, Step(optimizer, max_norm, scheduler, scaler).require_optimizer())

    def add(self, loss: Any, *, rows: int | None = None) -> None:
        """Add one piece's loss, in a loop that exists already; runs its backward.

        An error in here forgets the whole batch, as `.discard` does.

        Args:
            loss: what a loss function may return.
            rows: rows of the piece, needed for a scalar loss.
        """
        batch = self._open or self._new_batch(in_a_loop=True)
        with batch.agreement.together(), self._discarding():
            rows = None if rows is None else positive_integer("rows", rows, least=0)
            if self._open is None:
                statistics.refuse(statistics.keepers(self._model), in_a_loop=True)
                self._begin_loop(batch)
            batch.processes.check_apart()
            batch.add(loss, rows)

    def finish(
        self,
        optimizer: Optimizers | None = None,
        *,
        max_norm: float | None = None,
        scaler: Any = None,
        scheduler: Any = None,
    ) -> Result:
        """Turn what was added into the whole batch's gradient; with an optimizer, take its step.

        Args:
            optimizer: as for `.step`; without one, the gradient is left in `.grad`.
            max_norm: as for `.step`.
            scaler: as for `.step`. Give `.add` the loss as it is; from the second batch on its backward is scaled.
            scheduler: as for `.step`.
        """
        step = Step(optimizer, max_norm, scheduler, scaler)
        self._scaler = step.scaler
        return self._take(step, *self._close(step))

    def discard(self) -> None:
        """Forget what was added: `.grad` is as it was before the first piece."""
        batch, self._open = self._open, None
        if batch is not None:
            batch.undo()

    def _add_all(self, loss_fn: LossFunction, batch: Any, counts: CountFunction | None, step: Step) -> None:
        if self._open is not None:
            raise BatchError("pieces added with .add are still pending: call .finish() or .discard() first")
        for name, function in {"loss_fn": loss_fn, "counts": loss_fn if counts is None else counts}.items():
            if not callable(function):
                raise OptionTypeError(f"{name} must be a function of a piece, got {type(function).__name__}")
        opened = self._new_batch()
        processes = opened.processes
        with opened.agreement.together(), self._discarding():
            self._open = opened
            self._find_size(loss_fn, batch, counts, step)
            pieces = self._cut(batch, may_be_empty=processes.shared)
            opened.agreement.divisible = any(rows != 1 for rows in pieces.sizes)
            summed = counts and summed_counts([read_counts(counts(piece)) for piece, _ in pieces])
            own = Share(pieces.rows, len(pieces), summed)
            whole = opened.agreement.before(own)
            opened.statistics = statistics.Statistics(self._statistics_to_pool(whole, processes))
            opened.begin(
                own,
                whole,
                sum_dtype=self._accum_dtype,
                scaler=step.scaler,
                ignored_labels=lambda: self._ignored_labels(batch),
            )
            device = only_device(opened.parameters)
            with processes.apart(), opened.statistics.followed(), self._summing_in_place(len(pieces)):
                turns = whole.turns or len(pieces)
                for turn, (piece, rows) in enumerate(pieces.turns(turns, device), start=1):
                    again, last = turn > len(pieces), turn == turns
                    opened.statistics.start_piece(again)
                    if last:
                        opened.agreement.between()
                    processes.turn(last)
                    add = opened.add_nothing if again else opened.add
                    add(loss_fn(piece), rows, last)
                if not turns:
                    opened.agreement.between()

    def _find_size(self, loss_fn: LossFunction, batch: Any, counts: CountFunction | None, step: Step) -> None:
        if self._auto is not None and not isinstance(batch, Window):
            self._auto.choose(
                self._model,
                loss_fn,
                batch,
                optimizer=step.optimizers or None,
                counts=counts,
                accum_dtype=self._accum_dtype,
                in_place=self._in_place,
            )

    def _cut(self, batch: Any, *, may_be_empty: bool) -> Cut:
        sizes = self.micro_batch_size, self._num_micro_batches
        if self._by_length is None:
            return Cut(batch, *sizes, may_be_empty=may_be_empty)
        return Regrouped(batch, self._by_length, *sizes, may_be_empty=may_be_empty)

    def _run(self, loss_fn: LossFunction, batch: Any, counts: CountFunction | None, step: Step) -> Result:
        """A batch from the first piece to the step, with the size that was given or is found."""

        def once() -> tuple[OpenBatch, Result, bool]:
            self._add_all(loss_fn, batch, counts, step)
            return self._close(step)

        if self._auto is None or isinstance(batch, Window):
            return self._take(step, *once())
        return self._take(step, *self._auto.run(once, batch))

    def _close(self, step: Step) -> tuple[OpenBatch, Result, bool]:
        """The batch with its gradient in `.grad`, its result, and whether there was nothing in it to step with."""
        batch = self._open or self._new_batch(in_a_loop=True)
        with batch.agreement.together():
            if self._open is None:
                if not batch.processes.shared:
                    raise BatchError("nothing was added: call .add(loss) for each piece before .finish()")
                self._begin_loop(batch)
            try:
                result, verdict = batch.close(step, self._on_nonfinite)
                refused = verdict.nonfinite is not None or bool(step.optimizers and verdict.counted_nothing)
                if refused:
                    batch.skip()
                else:
                    batch.commit()
            except BaseException:
                self.discard()
                step.abandon()
                raise
        self._open = None
        return batch, result, refused

    def _take(self, step: Step, batch: OpenBatch, result: Result, refused: bool) -> Result:
        """The step, if it is to be taken; from here on nothing can be undone."""
        stepped = False
        if refused:
            step.zero(batch.parameters)
        else:
            stepped = step.take(batch.parameters)
        self.skipped += refused or (bool(step.optimizers) and not stepped)
        return dataclasses.replace(result, stepped=stepped)

    def _new_batch(self, *, in_a_loop: bool = False) -> OpenBatch:
        # first, as it brings parameters into the state in which they are found; a loop does not know its last piece
        processes = self._processes("once" if in_a_loop and self._sync == "overlap" else self._sync)
        processes.refuse()
        parameters = require(self._model.parameters())
        return OpenBatch(parameters, processes, None if in_a_loop else Snapshot(self._model, parameters))

    def _begin_loop(self, batch: OpenBatch) -> None:
        self._open = batch
        batch.begin(sum_dtype=self._accum_dtype, scaler=self._scaler)

    def _processes(self, sync: Sync) -> Alone:
        return processes_of(self._model, sync)

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        """Whatever goes wrong within, Ctrl-C included, is as if nothing had been added."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def _statistics_to_pool(self, whole: Share, processes: Alone) -> dict[str, Any]:
        """The modules whose batch statistics have to be pooled, unless those that do not see all of it are refused."""
        found = statistics.keepers(self._model) if whole.pieces != 1 or processes.shared else {}
        statistics.refuse_scripted(found)
        cut = {name: one for name, one in found.items() if not statistics.sees_all(one, whole, processes)}
        if self._batch_norm == "refuse":
            statistics.refuse(cut)
        elif cut and not self._warned:
            statistics.warn(cut)
            self._warned = True
        return found

    def _summing_in_place(self, num_pieces: int) -> AbstractContextManager[None]:
        """One piece has nothing to add to."""
        assert self._open is not None
        if self._in_place is False or (self._in_place == "auto" and num_pieces == 1):
            return nullcontext()
        return summing_in_place(self._model, self._open.sums, WORTH_IT if self._in_place == "auto" else 0)

    def _ignored_labels(self, batch: Any) -> Tensor | None:
        return ignored_labels(batch)


def backward(
    model: nn.Module | Iterable[nn.Module] | Iterable[Tensor],
    loss_fn: LossFunction,
    batch: Any,
    *,
    counts: CountFunction | None = None,
    scaler: Any = None,
    **options: Unpack[Options],
) -> Result:
    """Add the whole batch's gradient to `.grad`, in place of `loss_fn(batch).backward()`.

    Args:
        model: as for `Accumulator`.
        loss_fn: as for `Accumulator.backward`.
        batch: as for `Accumulator.backward`.
        counts: as for `Accumulator.backward`.
        scaler: as for `Accumulator.backward`.
        options: those of `Accumulator`, such as `micro_batch_size=16`.

    >>> model = torch.nn.Linear(4, 1)
    >>> x, y = torch.randn(50, 4), torch.randn(50, 1)
    >>> def loss_fn(piece):
    ...     x, y = piece
    ...     return torch.nn.functional.mse_loss(model(x), y)
    >>> loss = backward(model, loss_fn, (x, y), micro_batch_size=16).loss
    """
    return Accumulator(model, **options).backward(loss_fn, batch, counts=counts, scaler=scaler)
