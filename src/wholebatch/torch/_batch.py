"""One batch on its way through the rooms.

    local sums → agree → reduce → finalise → result

`OpenBatch` holds what is pending between the first piece and the result, and can undo all of it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._errors import CountError, NonFiniteError
from ._agree import Agreement, Share
from ._finalise import finalise
from ._gradients import norm_of
from ._host import read_once
from ._ledger import Ledger
from ._loss import Count, read
from ._peers import Alone
from ._result import Result
from ._series import Series
from ._state import Snapshot
from ._statistics import Statistics
from ._step import Step, loss_scale
from ._sums import GradientSums, SumDtype
from ._totals import Totals
from ._verdict import Verdict, judge
from ._weights import Pass, Weights, nothing


class OpenBatch:
    """A batch whose pieces are being added. Nothing is touched before `begin`.

    Args:
        parameters: the model's.
        processes: who shares the batch.
        surroundings: what the pieces disturb besides gradients, where the library runs them.
    """

    def __init__(self, parameters: list[Tensor], processes: Alone, surroundings: Snapshot | None = None) -> None:
        self.parameters = parameters
        self._surroundings = surroundings
        self.processes = processes
        self.agreement = Agreement(processes)
        self.statistics = Statistics({})
        self.sums = GradientSums(adopts=not processes.sharded)  # with shards, leaves are made for each forward

    def begin(
        self,
        own: Share = Share(),  # noqa: B008 - it cannot be changed
        whole: Share = Share(),  # noqa: B008
        *,
        sum_dtype: SumDtype = "auto",
        scaler: Any = None,
        ignored_labels: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        """Take over the gradients.

        Args:
            own: what is known beforehand of this process's part of the batch: nothing in a loop.
            whole: and of the whole batch.
            sum_dtype: what gradients are summed in where there are several pieces.
            scaler: a `GradScaler` whose scale the gradients are to have while they are summed.
            ignored_labels: asks for a flag on the device, whether the batch's labels hold -100; a `Mean` need not know.
        """
        self._own_counts, self._counts = own.counts, whole.counts
        self._scale = None if scaler is None else loss_scale(scaler, self.parameters[0].device)
        self._in_a_loop = own.pieces is None
        self._ignored_labels = ignored_labels
        self._ledger = Ledger(own.pieces)
        self._weights = Weights(
            whole.rows,
            whole.pieces,
            self._counts,
            loss_scale=self._scale,
            small_range=scaler is not None or any(p.dtype == torch.float16 for p in self.parameters),
            divided_last=self.processes.lockstep or self.processes.overlaps,
        )
        # a scaler does not unscale 16 bits, so with one even a single piece is summed in more
        single = own.pieces == 1 and scaler is None
        self.sums.begin(self.parameters, None if single or self.processes.sharded else sum_dtype)

    def add(self, returned: Any, rows: int | None, last: bool = False) -> None:
        """Read a piece's loss, run its backward, and keep its numbers."""
        reading = read(returned, rows)
        self._ledger.enter(reading, rows)
        main, aside = self._weights.passes(reading)
        if not main.values and not aside.values:
            self._ledger.graphless.append(self._ledger.pieces)
            if self.processes.lockstep:
                main = nothing(reading)
        self.sums.add(main.carrying(self.processes.carried(self.sums)) if last else main, aside)

    def add_nothing(self, returned: Any, rows: int | None, last: bool = False) -> None:
        """Run the backward of a piece that was added before, without adding anything."""
        self.sums.add(nothing(read(returned, rows)), Pass([], []))

    def sum_up(self) -> None:
        """Turn the sums into the gradient without a verdict, which needs values."""
        finalise(self.sums, self._weights.factor(self._ledger.totals()), None)
        self.statistics.settle(self.processes, self.statistics.calls)

    def close(self, step: Step, on_nonfinite: str) -> tuple[Result, Verdict]:
        """Turn the sums into the gradient; all of it can still be undone afterwards."""
        if self._in_a_loop and not (step.scaler is None and self._scale is None):
            self.sums.scale(self._ratio_of_scales(step.scaler))
        looking = on_nonfinite != "keep" and step.scaler is None
        self.processes.settle(self.sums)
        judge_own = functools.partial(self._judge_own, on_nonfinite=on_nonfinite, looking=looking)
        whole = self.agreement.after(self._ledger, self.sums, judge_own, self.statistics.calls)
        factor = self.processes.reduce(self.sums, self._weights.factor(whole.totals), whole.untouched)
        self.statistics.settle(self.processes, whole.calls)
        norm = finalise(self.sums, factor, None if step.scaler else step.max_norm)
        verdict = self._judge(whole.totals, self._counts, looking, norm)
        if whole.nonfinite:
            verdict = dataclasses.replace(verdict, nonfinite=whole.nonfinite)
        if verdict.counted_nothing:
            self.sums.forget()
        _raise_nonfinite(verdict, on_nonfinite)
        if step.scaler is not None and step.optimizers and not verdict.counted_nothing:
            norm = step.unscale_and_clip(self.sums)
        return Result.of(whole.totals, verdict, whole.rows, self._ledger.pieces, norm), verdict

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

    def _judge_own(self, totals: Totals, on_nonfinite: str, looking: bool) -> str | None:
        """What is not finite in this process's pieces, where others share the batch and have to know."""
        verdict = self._judge(totals, self._own_counts, looking)
        _raise_nonfinite(verdict, on_nonfinite)
        return verdict.nonfinite

    def _judge(
        self, totals: Totals, declared: dict[str, Count] | None, looking: bool, norm: Tensor | None = None
    ) -> Verdict:
        verdict = judge(
            totals,
            declared=declared,
            graphless=self._ledger.graphless,
            norm=norm,
            ignored_labels=self._ignored_labels() if self._ledger.counts_rows_only else None,
            look_for_nonfinite=looking,
        )
        if verdict.doubtful and not verdict.counted_nothing and not verdict.nonfinite and not self._finite():
            return dataclasses.replace(verdict, nonfinite=f"{verdict.doubtful}, and so is its gradient")
        return verdict

    def _finite(self) -> bool:
        """Whether the gradients are; asked only where a piece gives reason to doubt it, as it costs another read."""
        given, adopted = self.sums.gradients()
        return bool(read_once([norm_of(given + adopted)])[0].isfinite().all())

    def _ratio_of_scales(self, scaler: Any) -> Tensor:
        """Pieces that were added before their scaler was known, or had changed, have another scale or none."""
        device = self.parameters[0].device
        now = torch.ones((), device=device) if scaler is None else loss_scale(scaler, device)
        return now if self._scale is None else now / self._scale


def _raise_nonfinite(verdict: Verdict, on_nonfinite: str) -> None:
    if verdict.nonfinite and on_nonfinite == "raise":
        raise NonFiniteError(
            f"{verdict.nonfinite}; .grad is as it was before the batch "
            '(on_nonfinite="skip" goes on without a step, "keep" does not look)'
        )


def summed_counts(pieces: list[dict[str, Count]]) -> dict[str, Count]:
    """What `counts=` said of every piece, over the batch."""
    for piece, counts in enumerate(pieces, start=1):
        if counts.keys() != pieces[0].keys():
            raise CountError(
                f"counts= names {', '.join(pieces[0])} for piece 1 and {', '.join(counts)} for piece {piece}"
            )
    sums = {name: Series(len(pieces)) for name in (pieces[0] if pieces else ())}
    for counts in pieces:
        for name, count in counts.items():
            sums[name].append(count)
    return {name: series.sum() for name, series in sums.items()}
