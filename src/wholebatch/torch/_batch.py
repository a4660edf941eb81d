"""One batch on its way through the rooms.

    local sums → agree → reduce → finalise → result

`OpenBatch` holds what is pending between the first piece and the result, and can undo all of it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._errors import CountError, NonFiniteError
from ._agree import agree
from ._finalise import finalise
from ._ledger import Ledger
from ._loss import Count, read
from ._reduce import reduce
from ._result import Result
from ._series import Series
from ._step import Step, loss_scale
from ._sums import GradientSums, SumDtype
from ._verdict import Verdict, judge
from ._weights import Weights


class OpenBatch:
    """A batch whose pieces are being added.

    Args:
        parameters: the model's.
        rows: rows of the whole batch, where they are known beforehand.
        num_micro_batches: the number of pieces, where it is known beforehand.
        sum_dtype: what gradients are summed in where there are several pieces.
        scaler: a `GradScaler` whose scale the gradients are to have while they are summed.
        ignored_labels: a flag on the device, whether the batch's labels hold -100.
    """

    undo_surroundings: Callable[[], None] | None = None
    """Brings back what the pieces disturbed besides gradients, where the library runs them."""

    def __init__(
        self,
        parameters: list[Tensor],
        *,
        rows: int | None = None,
        num_micro_batches: int | None = None,
        sum_dtype: SumDtype = "auto",
        scaler: Any = None,
        ignored_labels: Tensor | None = None,
    ) -> None:
        self._parameters = parameters
        self._scaler = scaler
        self._ledger = Ledger(num_micro_batches)
        self._weights = Weights(
            rows,
            num_micro_batches,
            loss_scale=None if scaler is None else loss_scale(scaler, parameters[0].device),
            small_range=any(parameter.dtype == torch.float16 for parameter in parameters),
        )
        self._sums = GradientSums(parameters, None if num_micro_batches == 1 else sum_dtype)
        self._ignored_labels = ignored_labels

    def declare_counts(self, pieces: list[dict[str, Count]]) -> None:
        """Take what `counts=` said of every piece as the denominators of the batch."""
        for piece, counts in enumerate(pieces, start=1):
            if counts.keys() != pieces[0].keys():
                raise CountError(
                    f"counts= names {', '.join(pieces[0])} for piece 1 and {', '.join(counts)} for piece {piece}"
                )
        sums = {name: Series(len(pieces)) for name in pieces[0]}
        for counts in pieces:
            for name, count in counts.items():
                sums[name].append(count)
        self._weights.counts = {name: series.sum() for name, series in sums.items()}

    def add(self, returned: Any, rows: int | None) -> None:
        """Read a piece's loss, run its backward, and keep its numbers."""
        reading = read(returned, rows)
        self._ledger.enter(reading, rows)
        main, aside = self._weights.passes(reading)
        if self._ledger.pieces == 1:
            self._sums.adopt(*main.values, *aside.values)
        self._sums.add(main, aside)

    def close(self, step: Step, on_nonfinite: str) -> tuple[Result, Verdict]:
        """Turn the sums into the gradient; `.grad` can still be undone afterwards."""
        if step.scaler is not self._scaler:
            self._sums.scale(self._ratio_of_scales(step.scaler))
        totals = agree(self._ledger.totals())
        reduce(self._sums)
        norm = finalise(self._sums, self._weights.factor(totals), None if step.scaler else step.max_norm)
        verdict = judge(
            totals,
            declared=self._weights.counts,
            norm=norm,
            ignored_labels=self._ignored_labels if self._ledger.has_means_over_rows else None,
            look_for_nonfinite=on_nonfinite != "keep" and step.scaler is None,
        )
        if verdict.nonfinite and on_nonfinite == "raise":
            raise NonFiniteError(
                f"{verdict.nonfinite}; .grad is as it was before the batch "
                '(on_nonfinite="skip" goes on without a step, "keep" does not look)'
            )
        if step.scaler is not None and step.optimizers and not verdict.counted_nothing:
            norm = step.unscale_and_clip(self._sums)
        return Result.of(totals, verdict, self._ledger, norm), verdict

    def commit(self, step: Step, result: Result) -> Result:
        """Leave the gradient in `.grad` and take the step; from here there is no way back."""
        self._sums.commit()
        return dataclasses.replace(result, stepped=step.take(self._parameters))

    def skip(self, step: Step) -> None:
        """Contribute nothing, and take no step."""
        self._sums.restore()
        step.zero(self._parameters)

    def undo(self) -> None:
        """Bring back everything as it was before the batch."""
        self._sums.restore()
        if self.undo_surroundings is not None:
            self.undo_surroundings()

    def _ratio_of_scales(self, scaler: Any) -> Tensor:
        """Pieces that were added before their scaler was known have the scale of another, or none."""
        device = self._parameters[0].device
        now, then = (1.0 if s is None else loss_scale(s, device) for s in (scaler, self._scaler))
        return torch.as_tensor(now / then)
