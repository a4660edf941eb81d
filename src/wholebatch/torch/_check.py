"""Check: is a split exact on this model, and if not, why? Compute both gradients and compare them.

In float64 where the model allows it, in the model's own precision where the loss then fails.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .._errors import BatchError
from .._plan import balanced, check_sizes
from .._report import Report, report_of_other_layout, report_on, tolerance
from .._sample import cuts_to_try, rows_to_use
from ._cut import rows_of, spread_rows, to_device
from ._loss import LossFunction
from ._model import Model, only_device
from ._probes import TorchProbe, exact_layout
from ._processes import processes_of
from ._randomness import OwnGenerators, Start
from ._regroup import LengthFunction, TrimFunction
from ._sums import GradientSums
from ._trial import NOTHING_OFF, Trial
from ._wide import in_float64, widen
from ._window import Window


def check(
    model: nn.Module | Iterable[nn.Module] | Iterable[Tensor],
    loss_fn: LossFunction,
    batch: Any,
    *,
    micro_batch_size: int | None = None,
    lengths: LengthFunction | None = None,
    trim: TrimFunction | None = None,
) -> Report:
    """Compare the gradient of a batch with that of its pieces, for several ways of cutting it, and say why they differ.

    Parameters, buffers, gradients, modes and random generators are as before afterwards. Each process judges its own
    rows.

    Args:
        model: as for `Accumulator`.
        loss_fn: as for `Accumulator.backward`.
        batch: as for `Accumulator.backward`, but no `Window`; a few rows are used, spread over it.
        micro_batch_size: a size to try besides the usual ones.
        lengths: as for `Accumulator`: pieces are then of rows sorted by length and trimmed, and the whole is not.
        trim: as for `Accumulator`.

    >>> import torch
    >>> model = torch.nn.Linear(4, 1)
    >>> x, y = torch.randn(50, 4), torch.randn(50, 1)
    >>> check(model, lambda b: (model(b[0]) - b[1]).square().mean(), (x, y)).exact
    True
    """
    micro_batch_size, _ = check_sizes(micro_batch_size, None)
    if isinstance(batch, Window):
        raise BatchError("a Window is cut already, and there is no whole to compare with: give one whole batch")
    judged = Model(model)
    rows_of(batch)
    job = _Check(judged, loss_fn, batch, micro_batch_size, {"lengths": lengths, "trim": trim})
    try:
        with _untouched(judged, job.own_generators) as sums, in_float64(judged):
            return job.report(sums, widen)
    except Exception:  # the loss may insist on the model's own precision; if that is not it, it fails again
        try:
            with _untouched(judged, job.own_generators) as sums:
                return job.report(sums, _as_it_is)
        except Exception as error:
            report = job.report_of_failure(error)
            if report is None:
                raise
            return report


class _Check:
    """One call of `check`.

    Args:
        model: the user's.
        loss_fn: the user's.
        batch: the user's.
        size: a size of pieces to try besides.
        regrouping: the options of `Accumulator` that say how rows are regrouped.
    """

    def __init__(
        self, model: Model, loss_fn: LossFunction, batch: Any, size: int | None, regrouping: dict[str, Any]
    ) -> None:
        self._model, self._loss_fn, self._batch, self._size = model, loss_fn, batch, size
        self._regrouping = regrouping
        self.own_generators = OwnGenerators(loss_fn, *model.members)

    def report(self, sums: GradientSums, prepare: Callable[[Any], Any]) -> Report:
        """The verdict on the batch as it is."""
        trial = self._make_trial(self._loss_fn, self._batch, sums, prepare)
        rows = trial.rows
        cuts = cuts_to_try(rows, self._size and len(balanced(rows, micro_batch_size=self._size)))
        probe = TorchProbe(
            trial,
            lambda loss_fn, batch: self._make_trial(loss_fn, batch, sums, prepare),
            self._loss_fn,
            self._batch,
            prepare,
            lambda eps: tolerance(eps, max(cuts)),
        )
        return report_on(probe, cuts)

    def report_of_failure(self, error: Exception) -> Report | None:
        """The verdict where already a few rows fail, if that is because they are no rows."""
        for prepare, precision in ((widen, in_float64), (_as_it_is, _nothing)):
            with _untouched(self._model, self.own_generators) as sums, precision(self._model):
                what = exact_layout(
                    self._batch,
                    self._loss_fn,
                    lambda loss_fn, batch: self._make_trial(loss_fn, batch, sums, prepare),  # noqa: B023
                    prepare,
                    NOTHING_OFF,
                    1e-6,
                )
            if what is not None:
                rows = rows_to_use(rows_of(self._batch), self._size)
                return report_of_other_layout(what, self._model.named_parameters(), rows, error)
        return None

    def _make_trial(
        self, loss_fn: LossFunction, batch: Any, sums: GradientSums, prepare: Callable[[Any], Any]
    ) -> Trial:
        rows = rows_to_use(rows_of(batch), self._size)
        part = to_device(spread_rows(batch, rows), only_device(self._model.parameters()))
        return Trial(self._model, loss_fn, prepare(part), rows, sums, self.own_generators, self._regrouping)


@contextmanager
def _untouched(model: Model, own_generators: OwnGenerators) -> Iterator[GradientSums]:
    """Gradients, buffers and random states are afterwards as they were."""
    start = Start(model, own_generators)
    sums = GradientSums(claims=False)  # the accumulators that are judged need the leaves
    try:
        sums.begin(model.parameters())
        with processes_of(model).apart():
            yield sums
    finally:
        sums.restore()
        start.restore()


def _as_it_is(batch: Any) -> Any:
    return batch


@contextmanager
def _nothing(model: Model) -> Iterator[None]:
    yield
