"""One batch on its way through the rooms.

    local sums → agree → reduce → finalise → result

`OpenBatch` holds what is pending between the first piece and the result, and can undo all of it.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .._errors import CountError, NonFiniteError
from ._agree import agree
from ._finalise import finalise, norm_of
from ._host import read_once
from ._ledger import Ledger
from ._loss import Count, read
from ._reduce import reduce
from ._result import Result
from ._series import Series
from ._state import Snapshot
from ._step import Step, loss_scale
from ._sums import GradientSums, SumDtype
from ._verdict import Verdict, judge
from ._weights import Weights


class OpenBatch:
    """A batch whose pieces are being added. Nothing is touched before `begin`.

    Args:
        parameters: the model's.
        surroundings: what the pieces disturb besides gradients, where the library runs them.
    """

    def __init__(self, parameters: list[Tensor], surroundings: Snapshot | None = None) -> None:
        self.parameters = parameters
        self._surroundings = surroundings
        self.sums = GradientSums()

    def begin(
        self,
        *,
        rows: int | None = None,
        num_micro_batches: int | None = None,
        counts: dict[str, Count] | None = None,
        sum_dtype: SumDtype = "auto",
        scaler: Any = None,
        ignored_labels: Tensor | None = None,
    ) -> None:
        """Take over the gradients.

        Args:
            rows: rows of the whole batch, where they are known beforehand.
            num_micro_batches: the number of pieces, where it is known beforehand.
            counts: each term's count over the whole batch, where `counts=` gave them.
            sum_dtype: what gradients are summed in where there are several pieces.
            scaler: a `GradScaler` whose scale the gradients are to have while they are summed.
            ignored_labels: a flag on the device, whether the batch's labels hold -100.
        """
        self._counts = counts
        self._scale = None if scaler is None else loss_scale(scaler, self.parameters[0].device)
        self._in_a_loop = num_micro_batches is None
        self._ignored_labels = ignored_labels
        self._ledger = Ledger(num_micro_batches)
        self._weights = Weights(
            rows,
            num_micro_batches,
            counts,
            loss_scale=self._scale,
            small_range=scaler is not None or any(p.dtype == torch.float16 for p in self.parameters),
        )
        # a scaler does not unscale 16 bits, so with one even a single piece is summed in more
        self.sums.begin(self.parameters, None if num_micro_batches == 1 and scaler is None else sum_dtype)

    def add(self, returned: Any, rows: int | None) -> None:
        """Read a piece's loss, run its backward, and keep its numbers."""
        reading = read(returned, rows)
        self._ledger.enter(reading, rows)
        main, aside = self._weights.passes(reading)
        if not main.values and not aside.values:
            self._ledger.graphless.append(self._ledger.pieces)
        self.sums.add(main, aside)

    def close(self, step: Step, on_nonfinite: str) -> tuple[Result, Verdict]:
        """Turn the sums into the gradient; all of it can still be undone afterwards."""
        if self._in_a_loop and not (step.scaler is None and self._scale is None):
            self.sums.scale(self._ratio_of_scales(step.scaler))
        totals = agree(self._ledger.totals())
        reduce(self.sums)
        norm = finalise(self.sums, self._weights.factor(totals), None if step.scaler else step.max_norm)
        looking = on_nonfinite != "keep" and step.scaler is None
        verdict = judge(
            totals,
            declared=self._counts,
            graphless=self._ledger.graphless,
            norm=norm,
            ignored_labels=self._ignored_labels if self._ledger.counts_rows_only else None,
            look_for_nonfinite=looking,
        )
        if verdict.counted_nothing:
            self.sums.forget()
        elif verdict.doubtful and not verdict.nonfinite and not self._finite():
            verdict = dataclasses.replace(verdict, nonfinite=f"{verdict.doubtful}, and so is its gradient")
        if verdict.nonfinite and on_nonfinite == "raise":
            raise NonFiniteError(
                f"{verdict.nonfinite}; .grad is as it was before the batch "
                '(on_nonfinite="skip" goes on without a step, "keep" does not look)'
            )
        if step.scaler is not None and step.optimizers and not verdict.counted_nothing:
            norm = step.unscale_and_clip(self.sums)
        return Result.of(totals, verdict, self._ledger, norm), verdict

    def commit(self) -> None:
        """Leave the gradient in `.grad`."""
        self.sums.commit()

    def skip(self) -> None:
        """Contribute nothing: neither gradients nor what a loss that is not finite left in buffers."""
        self.sums.restore()
        if self._surroundings is not None:
            self._surroundings.restore_buffers()

    def undo(self) -> None:
        """Bring back everything as it was before the batch."""
        self.sums.restore()
        if self._surroundings is not None:
            self._surroundings.restore()

    def _finite(self) -> bool:
        """Whether the gradients are; asked only where a piece gives reason to doubt it, as it costs another read."""
        given, adopted = self.sums.gradients()
        return bool(read_once([norm_of(given + adopted)])[0].isfinite().all())

    def _ratio_of_scales(self, scaler: Any) -> Tensor:
        """Pieces that were added before their scaler was known, or had changed, have another scale or none."""
        device = self.parameters[0].device
        now = torch.ones((), device=device) if scaler is None else loss_scale(scaler, device)
        return now if self._scale is None else now / self._scale


def summed_counts(pieces: list[dict[str, Count]]) -> dict[str, Count]:
    """What `counts=` said of every piece, over the batch."""
    for piece, counts in enumerate(pieces, start=1):
        if counts.keys() != pieces[0].keys():
            raise CountError(
                f"counts= names {', '.join(pieces[0])} for piece 1 and {', '.join(counts)} for piece {piece}"
            )
    sums = {name: Series(len(pieces)) for name in pieces[0]}
    for counts in pieces:
        for name, count in counts.items():
            sums[name].append(count)
    return {name: series.sum() for name, series in sums.items()}
