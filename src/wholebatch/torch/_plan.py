"""Plan: which micro-batch fits a memory budget, found without running the model.

    peak(m) = max over time of Σ_storages c + d · m

A step is rehearsed with tensors that have no contents, for pieces of 2 and of 3 rows. Where both do the same, each
storage's bytes are a line in the rows, and so the peak is known for any number of them. What is different is rehearsed
for itself: a piece of one row (whose axis may vanish), the batch in one piece, and the size that was chosen.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from .._budget import Plan, bytes_of, fitted, largest_that_fits
from .._errors import BatchError, OptionError
from ._cut import rows_of
from ._lifetimes import Line, Timeline
from ._loss import CountFunction, LossFunction
from ._model import Model, require
from ._options import SumOptions
from ._rehearsal import GRADIENTS, PARAMETERS, AnOptimizer, Rehearsal
from ._window import Window


def plan(
    model: nn.Module | Iterable[nn.Module] | Iterable[Tensor],
    loss_fn: LossFunction,
    batch: Any,
    *,
    memory: int | str,
    optimizer: AnOptimizer | Sequence[Optimizer] | None = None,
    counts: CountFunction | None = None,
    **options: Unpack[SumOptions],
) -> Plan:
    """The largest micro-batch whose step fits a memory budget, without running it.

    The model may be on the meta device, and larger than this machine; it is then planned for the batch's device, or
    for the host. Model, optimizer and random generators are not touched. `loss_fn` is called a few times, with tensors
    that have no contents.

    Args:
        model: as for `Accumulator`.
        loss_fn: as for `Accumulator.backward`.
        batch: the batch that is to be cut; its tensors may be on the meta device too.
        memory: the budget for everything that a step holds on the model's device: bytes, or such as "24GiB".
        optimizer: one or several that hold the model's parameters, or a function that makes one from a list of them,
            such as `torch.optim.AdamW`. Without one, neither its state nor its step is counted.
        counts: as for `Accumulator.backward`.
        options: those of `Accumulator` that say how gradients are summed.

    >>> import torch
    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1))
    >>> x, y = torch.empty(8192, 1024, device="meta"), torch.empty(8192, 1, device="meta")
    >>> def loss_fn(piece):
    ...     x, y = piece
    ...     return nn.functional.mse_loss(model(x), y)
    >>> planned = plan(model, loss_fn, (x, y), memory="200MiB", optimizer=torch.optim.AdamW)
    >>> planned.micro_batch_size, planned.predicted_peak <= 200 * 2**20
    (2214, True)
    """
    budget = bytes_of(memory)
    sizes = options.keys() & {"micro_batch_size", "num_micro_batches"}
    if sizes:
        raise OptionError(f"{sizes.pop()} is what plan finds: leave it out")
    if isinstance(batch, Window):
        raise BatchError("a Window is cut already, and there is nothing to plan: give one whole batch")
    rows = rows_of(batch)
    planned = Model(model)
    require(planned.parameters())
    remarks = () if optimizer is not None else ("no optimizer was given: its state and its step are not counted",)
    with Rehearsal(planned, loss_fn, batch, optimizer, counts, options) as rehearsal:
        steps = _Steps(rehearsal, rows)
        chosen = largest_that_fits(steps.peak, range(1, rows + 1), budget)
        if not steps.confirm(chosen):
            chosen = largest_that_fits(steps.peak, range(1, rows + 1), budget)
        return fitted(chosen, steps.peak, steps.parts, rows=rows, memory=budget, sizes=steps.curve, remarks=remarks)


class _Steps:
    """The steps of a batch by the rows of its pieces."""

    def __init__(self, rehearsal: Rehearsal, rows: int) -> None:
        self._rehearsal = rehearsal
        self._rows = rows
        self._rehearsed: dict[tuple[int, int], Timeline] = {}
        self._on_a_line = True

    def peak(self, size: int) -> int:
        """The most bytes that a step with pieces of that many rows holds."""
        return self._peak(self._timeline(size))

    def confirm(self, size: int) -> bool:
        """Rehearse a size for itself; says whether the line told that, and what the batch in one piece allows."""
        told, found = self.peak(size), self._peak(self._rehearse(size, self._pieces(size)))
        confirmed = abs(found - told) <= told / 1000 and not self._tells_too_much()
        self._on_a_line = self._on_a_line and confirmed
        return confirmed

    def _tells_too_much(self) -> bool:
        """Whether the line rises beyond the batch in one piece by more than what pieces hold besides: their sums."""
        line = self._line(self._rows - 1)
        if line is None:
            return False
        one_piece = self._rehearse(self._rows, 1).peak()
        return line.at(self._rows).peak() > 1.01 * one_piece + 4 * self._rehearsal.gradients

    def parts(self, size: int, peak: int) -> Mapping[str, int]:
        """What the peak consists of; where that is in the optimizer's step, its temporaries are fixed."""
        alive, per_row, state = self._timeline(size).at_peak(), self._per_row(size), self._rehearsal.state
        named = alive.get(PARAMETERS, 0) + alive.get(GRADIENTS, 0) + state
        return {
            "parameters": alive.get(PARAMETERS, 0),
            "gradients": max(alive.get(GRADIENTS, 0), self._rehearsal.gradients),
            "optimizer": state,
            "activations_per_row": per_row,
            "fixed": peak - named - per_row * size,
        }

    def curve(self, chosen: int) -> Mapping[int, int]:
        """The peaks of some sizes, from one row to the whole batch."""
        self._line(self._rows - 1)
        doubling = {2**power for power in range(self._rows.bit_length())}
        some = {*doubling, 3, *(3 * size // 2 for size in doubling), chosen, chosen + 1, self._rows - 1}
        if not self._on_a_line:  # each size takes a rehearsal
            some = {*sorted(doubling)[::2], chosen, *(size for size, _ in self._rehearsed)}
        return {size: self.peak(size) for size in some | {self._rows} if 1 <= size <= self._rows}

    def _peak(self, timeline: Timeline) -> int:
        rehearsal = self._rehearsal
        return max(timeline.peak() + rehearsal.state, rehearsal.peak_of_step) + rehearsal.besides

    def _pieces(self, size: int) -> int:
        """A piece has one like it before it, so that gradients are there already, unless it is the whole batch."""
        return 1 if size == self._rows else 2

    def _timeline(self, size: int) -> Timeline:
        line = self._line(size)
        return self._rehearse(size, self._pieces(size)) if line is None else line.at(size)

    def _line(self, size: int) -> Line | None:
        """What tells of sizes beyond the ones that it goes through."""
        if size <= 3 or size == self._rows or not self._on_a_line:
            return None
        line = self._line_from(2, 2)
        self._on_a_line = line is not None
        return line

    def _line_from(self, size: int, pieces: int) -> Line | None:
        return Line.through(size, self._rehearse(size, pieces), self._rehearse(size + 1, pieces))

    def _per_row(self, size: int) -> int:
        """By how many bytes the peak before the optimizer's step grows with a row."""
        pieces, smaller = self._pieces(size), size // 2
        line = self._line(size) or self._line_from(size, pieces)
        if line is not None or not smaller:
            return line.growth_at_peak(size) if line else 0
        return (self._rehearse(size, pieces).peak() - self._rehearse(smaller, pieces).peak()) // (size - smaller)

    def _rehearse(self, size: int, pieces: int) -> Timeline:
        if (size, pieces) not in self._rehearsed:
            self._rehearsed[size, pieces] = self._rehearsal.step(size * pieces, pieces)
        return self._rehearsed[size, pieces]
