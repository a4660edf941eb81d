"""Trial: a model, a loss and a few rows, run again and again from the same start.

    error = max |split - whole| / max |whole|

over every entry of every parameter.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._causes import Cause
from .._errors import BatchError
from .._report import largest_error
from .._rules import Observation, Observe, stride
from .._terms import Per
from ._accumulator import Accumulator
from ._agree import Share
from ._loss import LossFunction, read
from ._model import Model
from ._peers import Alone
from ._processes import Sync
from ._randomness import OwnGenerators, SameDraws, Start
from ._sums import GradientSums
from ._tree import map_tensors

Gradients = dict[str, Tensor]
ByCut = dict[int, dict[str, float]]
NOTHING_OFF: frozenset[Cause] = frozenset()
SEEDS = 5
"""How many draws to try for one that leaves a gradient."""


class Trial:
    """Runs a loss on the whole of a few rows, on their pieces, and on any choice of them.

    Args:
        model: whose gradients are looked at.
        loss_fn: the user's.
        part: the rows.
        rows: how many.
        sums: own the gradients meanwhile.
        own_generators: those that the loss keeps to itself.
        options: of the `Accumulator` that splits, besides the number of pieces.
    """

    def __init__(
        self,
        model: Model,
        loss_fn: LossFunction,
        part: Any,
        rows: int,
        sums: GradientSums,
        own_generators: OwnGenerators,
        options: Mapping[str, Any],
    ) -> None:
        self.model, self.rows = model, rows
        self._loss_fn, self._part, self._sums, self._options = loss_fn, part, sums, options
        self.start = Start(model, own_generators)
        self.random = False
        """Whether runs differ by chance; then each has its own draws."""
        self.failure: str | None = None
        self.terms: dict[str, Per] = {}
        self._same_draws = SameDraws()
        self._draws: SameDraws | None = None
        self._keeps_buffers = True

    def whole(self, watching: Any = None) -> Gradients:
        """The gradient of all rows, by plain autograd on purpose: nothing of what is being judged."""

        def run() -> None:
            terms = read(self._call(self._part), self.rows).terms
            self.terms = {name: term.per for name, term in terms.items()}
            objective = torch.stack([term.weight * term.value / term.count for term in terms.values()]).sum()
            self._backward(objective, watching)

        return self._gradients(run)

    def errors(self, cuts: Sequence[int]) -> ByCut:
        """Each parameter's error in each cut. A split that fails where the whole does not is infinitely off."""
        self.reset()
        whole = self.whole()
        if not any(gradient.any() for gradient in whole.values()):
            raise BatchError(f"the gradient of these {self.rows} rows is zero everywhere: there is nothing to compare")
        return {pieces: self._error(whole, pieces) for pieces in cuts}

    def error_without(self, off: frozenset[Cause], cuts: Sequence[int]) -> float:
        """The largest error with these effects switched off."""
        with self.without(off):
            if "randomness" not in off:
                return self._largest_error(cuts)
            first, second = (self._error_of_draws(axes, cuts) for axes in (1, 2))
            error, self._same_draws = second if second[0] < first[0] / 2 else first
            return error

    def observe(self, term: str, off: frozenset[Cause], rows: Sequence[int]) -> Observation | None:
        """One term's gradient for these rows, from the start."""
        index = torch.tensor(list(rows))
        piece = map_tensors(lambda tensor: tensor[index.to(tensor.device)] if tensor.dim() else tensor, self._part)
        count = 1.0

        def run() -> None:
            nonlocal count
            found = read(self._call(piece), len(rows)).terms[term]
            if found.per is Per.OWN_COUNT:
                count = float(found.count)
            if found.value.requires_grad:
                self._backward(found.value)

        with self.without(off):
            self.reset()
            try:
                with self._draws or _nothing():
                    gradients = self._gradients(run)
            except Exception:
                return None
        real = [torch.view_as_real(g) if g.is_complex() else g for g in gradients.values()]
        some = [gradient.reshape(-1)[:: stride(gradient.numel())].double() for gradient in real]
        return Observation(torch.cat([entries.to(some[0].device) for entries in some]), count)

    def draws_by_row(self) -> bool:
        """Whether Python or NumPy, whose random numbers cannot be made equal, draws some for each row."""
        drawn = set()
        for rows in ([0], [0, 1]):
            self.observe(next(iter(self.terms)), frozenset(["randomness"]), rows)
            drawn.add(self.start.python.now())
        return len(drawn) > 1

    def view(self, term: str, off: frozenset[Cause]) -> Observe:
        """The same as a function of the rows."""
        return lambda rows: self.observe(term, off, rows)

    def reset(self) -> None:
        """Begin from the start; what is random goes on, unless it is switched off."""
        self.start.restore_buffers()
        if not self.random or self._draws is not None:
            self._restore_generators()

    @contextmanager
    def without(self, off: frozenset[Cause]) -> Iterator[None]:
        """Within, each row draws the same, no call leaves anything in buffers, and modules are in eval mode."""
        modes = [(module, module.training) for outer in self.model.modules for module in outer.modules()]
        before = self._draws, self._keeps_buffers
        try:
            self._draws = self._same_draws if "randomness" in off else None
            self._keeps_buffers = "state" not in off
            if "batch-statistics" in off:
                for module, _ in modes:
                    module.training = False
            yield
        finally:
            self._draws, self._keeps_buffers = before
            for module, training in modes:
                module.training = training

    def _largest_error(self, cuts: Sequence[int]) -> float:
        try:
            return largest_error(self.errors(cuts))
        except BatchError:
            return math.inf

    def _error_of_draws(self, axes: int, cuts: Sequence[int]) -> tuple[float, SameDraws]:
        """With the first draws that leave a gradient."""
        for seed in range(SEEDS):
            self._draws = draws = SameDraws(axes, seed or None)
            with draws:
                error = self._largest_error(cuts)
            if error < math.inf:
                break
        return error, draws

    def _error(self, whole: Gradients, pieces: int) -> dict[str, float]:
        several = sum(per is Per.OWN_COUNT for per in self.terms.values()) > 1
        self.reset()
        try:
            accumulator = _Judged(self.model.members, num_micro_batches=pieces, on_nonfinite="keep", **self._options)
            split = self._gradients(
                lambda: accumulator.backward(self._call, self._part, counts=self._counts if several else None)
            )
        except Exception as caught:  # the whole batch went well, so it is the split that this model does not bear
            self.failure = self.failure or f"{pieces} pieces: {type(caught).__name__}: {caught}"
            return dict.fromkeys(whole, math.inf)
        return errors(whole, split)

    def _restore_generators(self) -> None:
        self.start.restore_generators()
        if self._draws is not None and self._draws.seed is not None:
            torch.manual_seed(self._draws.seed)

    def _counts(self, piece: Any) -> dict[str, Any]:
        """What a user of several terms would give, from the loss itself."""
        terms = read(self._call(piece), self.rows).terms.items()
        return {name: term.count for name, term in terms if term.per is Per.OWN_COUNT}

    def _call(self, piece: Any) -> Any:
        if not self._keeps_buffers:
            self.start.restore_buffers()
        if self._draws is not None:
            self._restore_generators()
            self._draws.begin_call()
        return self._loss_fn(piece)

    def _backward(self, objective: Tensor, watching: Any = None) -> None:
        self._sums.adopt([objective])
        with watching or _nothing():
            objective.backward()

    def _gradients(self, run: Callable[[], Any]) -> Gradients:
        """Each parameter's gradient after `run`; zeros where it has none."""
        named = {name: p for name, p in self.model.named_parameters().items() if p.requires_grad}
        for parameter in named.values():
            parameter.grad = None
        run()
        return {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
            for name, parameter in named.items()
        }


def errors(whole: Gradients, split: Gradients) -> dict[str, float]:
    """Each parameter's largest difference, over the largest entry of the model."""
    scale = max((_largest(gradient) for gradient in whole.values()), default=0.0)
    scale = scale if 0 < scale < math.inf else 1.0
    return {name: _largest(split[name] - whole[name]) / scale for name in whole}


def _largest(entries: Tensor) -> float:
    """The largest magnitude; infinite where an entry is not a number, so that comparisons do not lose it."""
    return entries.abs().nan_to_num(nan=math.inf, posinf=math.inf).max().item() if entries.numel() else 0.0


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class _Judged(Accumulator):
    """Lets a wrong loss do what it would do, instead of refusing it, and asks no other process."""

    def _processes(self, sync: Sync) -> Alone:
        return Alone()

    def _statistics_to_pool(self, whole: Share, processes: Alone) -> dict[str, Any]:
        return {}

    def _ignored_labels(self, batch: Any) -> Tensor | None:
        return None
