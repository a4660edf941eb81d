"""One batch on its way through the rooms.

    local sums → agree → reduce → finalise → result

`OpenBatch` holds what is pending between the first piece and the result, and can undo all of it.
"""

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
from ._state import Snapshot
from ._sums import GradientSums
from ._tokens import refuse_ignored_labels
from ._totals import Totals
from ._verdict import Verdict, judge


class OpenBatch:
    """A batch whose pieces are being added.

    Args:
        parameters: the model's.
        snapshot: buffers and random states to go back to on failure, where the library runs the pieces.
        rows: rows of the whole batch, where they are known beforehand.
        num_micro_batches: the number of pieces, where it is known beforehand.
        ignored_labels: a flag on the device, whether the batch's labels hold -100.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        *,
        snapshot: Snapshot | None = None,
        rows: int | None = None,
        num_micro_batches: int | None = None,
        ignored_labels: Tensor | None = None,
    ) -> None:
        self._ledger = Ledger(rows, num_micro_batches)
        self._snapshot = snapshot
        self._ignored_labels = ignored_labels
        self._rows: int | None = 0
        self.sums = GradientSums(parameters)

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
        self._ledger.counts = {name: series.sum() for name, series in sums.items()}

    def add(self, returned: Any, rows: int | None) -> None:
        """Read a piece's loss, run its backward, and keep its numbers."""
        reading = read(returned, rows)
        main, aside = self._ledger.enter(reading)
        if self._ledger.pieces == 1:
            self.sums.adopt(*main.values, *aside.values)
        self.sums.add(main, aside)
        self._rows = None if rows is None or self._rows is None else self._rows + rows

    def close(self, max_norm: float | None, on_nonfinite: str) -> tuple[Result, Verdict]:
        """Turn the sums into the gradient; `.grad` can still be undone afterwards."""
        totals = agree(self._ledger.totals())
        reduce(self.sums)
        norm = finalise(self.sums, totals.factor, max_norm)
        verdict = judge(
            totals,
            self._ledger.counts or {},
            norm=norm,
            ignored_labels=self._ignored_labels if self._ledger.has_means_over_rows else None,
            look_for_nonfinite=on_nonfinite != "keep",
        )
        if verdict.ignored_labels:
            refuse_ignored_labels()
        if verdict.nonfinite and on_nonfinite == "raise":
            raise NonFiniteError(
                f"{verdict.nonfinite}; .grad is as it was before the batch "
                '(on_nonfinite="skip" goes on without a step, "keep" does not look)'
            )
        return self._result(totals, verdict, norm), verdict

    def undo(self) -> None:
        """Bring back everything as it was before the batch."""
        self.sums.restore()
        if self._snapshot is not None:
            self._snapshot.restore()

    def _result(self, totals: Totals, verdict: Verdict, norm: Tensor | None) -> Result:
        terms = {name: term.ratio for name, term in totals.terms.items()}
        only = next(iter(terms)) if len(terms) == 1 else None
        return Result(
            loss=torch.stack(list(terms.values())).sum() if only is None else terms[only],
            terms=terms,
            metrics={name: metric.ratio for name, metric in totals.metrics.items()},
            count=verdict.counts if only is None else verdict.counts[only],
            rows=self._rows,
            num_micro_batches=self._ledger.pieces,
            grad_norm=norm,
            stepped=False,
        )
