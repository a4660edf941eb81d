"""What the diagnosis can ask about a trial in torch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._causes import Cause
from .._layouts import Layout, other_layouts
from .._report import largest_error
from .._rules import Observation, rows_matter
from .._terms import Per
from . import _statistics as statistics
from ._loss import LossFunction
from ._tree import map_tensors, tensors
from ._trial import NOTHING_OFF, ByCut, Gradients, Trial, errors

MakeTrial = Callable[[LossFunction, Any], Trial]
"""A trial of a loss on a batch, in the precision that is being used."""


class TorchProbe:
    """A trial and what disturbs it.

    Args:
        trial: of the user's batch as it is.
        make_trial: for the same in another layout.
        loss_fn: the user's.
        batch: the user's, all of it.
        prepare: gives tensors the precision that is being used.
        tolerance: how large an error may be, by the precision that takes part.
    """

    def __init__(
        self,
        trial: Trial,
        make_trial: MakeTrial,
        loss_fn: LossFunction,
        batch: Any,
        prepare: Callable[[Any], Any],
        tolerance: Callable[[float], float],
    ) -> None:
        self._trial, self._make_trial, self._loss_fn, self._batch = trial, make_trial, loss_fn, batch
        self._prepare = prepare
        self.rows = trial.rows
        seen = _LeastPrecise()
        trial.reset()
        with trial.start.own_generators:
            first = trial.whole(seen)
        self.dtype = str(seen.dtype).removeprefix("torch.")
        self.eps = torch.finfo(seen.dtype).eps
        self.tolerance = tolerance(self.eps)
        self._repeats = True
        self.suspects: list[Cause] = []
        self._look_for_changes(first)
        keepers = statistics.keepers(trial.model)
        self._keepers = [f"{name or 'the model'} ({type(module).__name__})" for name, module in keepers.items()]
        if keepers or any(module.training for outer in trial.model.modules for module in outer.modules()):
            self.suspects.append("batch-statistics")
        certain: list[Cause] = ["randomness"]
        self.certain = frozenset(certain + self.suspects[-1:] if keepers else certain)

    def judge(self, cuts: Sequence[int]) -> ByCut:
        """The error of each parameter in each cut."""
        self._cuts = cuts
        by_cut = self._trial.errors(cuts)
        self.error = largest_error(by_cut)
        self.failure = self._trial.failure
        return by_cut

    def repeats(self) -> bool:
        return self._repeats

    def error_without(self, off: frozenset[Cause]) -> float:
        return self._trial.error_without(off, self._cuts)

    def draws_by_row(self) -> bool:
        return self._trial.draws_by_row()

    def where(self, cause: Cause) -> str:
        return ", ".join(self._keepers[:3]) if cause == "batch-statistics" else ""

    def terms(self) -> dict[str, Per]:
        return self._trial.terms

    def observe(self, term: str, off: frozenset[Cause], rows: Sequence[int]) -> Observation | None:
        return self._trial.observe(term, off, rows)

    def sees_batch_statistics(self) -> bool:
        self._trial.reset()
        with _BatchNormWatch() as watch:
            self._trial.whole()
        return bool(watch.seen)

    def other_layout(self, off: frozenset[Cause] = NOTHING_OFF) -> str | None:
        return exact_layout(self._batch, self._loss_fn, self._make_trial, self._prepare, off, self.tolerance)

    def _look_for_changes(self, first: Gradients) -> None:
        """Run it again: nothing may have changed, unless by chance or by what it left behind."""
        start, trial = self._trial.start, self._trial
        if not any(self._differs(first) for _ in range(3 if start.has_drawn() else 1)):
            return
        start.restore()
        if self._differs(first):
            self._repeats = False
            return
        start.restore_buffers()
        if any(self._differs(first, start.restore_buffers) for _ in range(3)):
            trial.random = True
            self.suspects.append("randomness")
        start.restore()
        trial.whole()
        start.restore_generators()
        if self._differs(first):
            self.suspects.append("state")

    def _differs(self, first: Gradients, before: Callable[[], None] = lambda: None) -> bool:
        before()
        return not max(errors(first, self._trial.whole()).values(), default=0.0) <= self.tolerance


def exact_layout(
    batch: Any,
    loss_fn: LossFunction,
    make_trial: MakeTrial,
    prepare: Callable[[Any], Any],
    off: frozenset[Cause],
    tolerance: float,
) -> str | None:
    """The first other layout of a batch in which a split is exact, in words."""
    shapes = {path: tuple(tensor.shape) for path, tensor in tensors(batch) if tensor.dim()}
    for what, layout in other_layouts(shapes):
        try:
            trial = make_trial(*_laid_out(batch, loss_fn, layout, prepare))
            exact = trial.rows > 1 and trial.error_without(off, [2, min(3, trial.rows)]) <= tolerance
            if exact and any(rows_matter(trial.rows, trial.view(term, off)) for term in trial.terms):
                return what
        except Exception:  # it cannot be meant like this
            continue
    return None


def _laid_out(
    batch: Any, loss_fn: LossFunction, layout: Layout, prepare: Callable[[Any], Any]
) -> tuple[LossFunction, list[Tensor]]:
    """The loss as a function of the tensors that are cut, with their rows on the leading axis."""
    axes = [layout.get(path) for path, _ in tensors(batch)]
    given = list(zip((tensor for _, tensor in tensors(batch)), axes, strict=True))
    cut = [tensor.movedim(axis, 0) for tensor, axis in given if axis is not None]
    whole = [prepare(tensor) for tensor, axis in given if axis is None]

    def loss_of_cut(piece: list[Tensor]) -> Any:
        rows, others = iter(piece), iter(whole)
        leaves = iter(
            [next(others).to(piece[0].device) if axis is None else next(rows).movedim(0, axis) for axis in axes]
        )
        return loss_fn(map_tensors(lambda _: next(leaves), batch))

    return loss_of_cut, cut


class _LeastPrecise(TorchDispatchMode):
    """Watches which floating point types a backward computes in; what it does not reach does not matter."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(returned):
            if isinstance(tensor, Tensor) and tensor.dtype.is_floating_point:
                self.dtype = max(self.dtype, tensor.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return returned


class _BatchNormWatch(TorchDispatchMode):
    """Watches for functions that normalise by the statistics of several rows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        if "batch_norm" in schema.name and "backward" not in schema.name and len(args[0]) > 1:
            names = [argument.name for argument in schema.arguments]
            self.seen |= "with_update" in schema.name or ("training" in names and bool(args[names.index("training")]))
        return func(*args, **(kwargs or {}))
