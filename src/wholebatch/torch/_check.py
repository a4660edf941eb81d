"""Check: is a split exact on this model? Compute both gradients and compare them.

    error = max |split - whole| / max |whole|

over every entry of every parameter; in float64 where the model allows it.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._errors import BatchError
from .._plan import balanced, check_sizes
from .._report import Report, cuts_to_try, rows_to_use
from .._terms import Per
from ._accumulator import Accumulator
from ._cut import rows_of, spread_rows, to_device
from ._loss import LossFunction, read
from ._model import Model, only_device
from ._regroup import LengthFunction, TrimFunction
from ._state import Snapshot
from ._sums import GradientSums
from ._wide import in_float64, widen
from ._window import Window

Gradients = dict[str, Tensor]


def check(
    model: nn.Module | Iterable[nn.Module] | Iterable[Tensor],
    loss_fn: LossFunction,
    batch: Any,
    *,
    micro_batch_size: int | None = None,
    lengths: LengthFunction | None = None,
    trim: TrimFunction | None = None,
) -> Report:
    """Compare the gradient of a batch with that of its pieces, for several ways of cutting it.

    Parameters, buffers, gradients and random generators are as before afterwards.

    Args:
        model: as for `Accumulator`.
        loss_fn: as for `Accumulator.backward`.
        batch: as for `Accumulator.backward`, but no `Window`; a few rows are used, spread over it.
        micro_batch_size: a size to try besides the usual ones.
        lengths: as for `Accumulator`: pieces are then of rows sorted by length and trimmed, and the whole is not.
        trim: as for `Accumulator`.

    >>> model = torch.nn.Linear(4, 1)
    >>> x, y = torch.randn(50, 4), torch.randn(50, 1)
    >>> check(model, lambda b: (model(b[0]) - b[1]).square().mean(), (x, y)).exact
    True
    """
    micro_batch_size, _ = check_sizes(micro_batch_size, None)
    if isinstance(batch, Window):
        raise BatchError("a Window is cut already, and there is no whole to compare with: give one whole batch")
    by_length: dict[str, Any] = {"lengths": lengths, "trim": trim}
    judged = Model(model)
    rows = rows_to_use(rows_of(batch), micro_batch_size)
    pieces_of_size = micro_batch_size and len(balanced(rows, micro_batch_size=micro_batch_size))
    cuts = cuts_to_try(rows, pieces_of_size)
    part = to_device(spread_rows(batch, rows), only_device(judged.parameters()))
    try:
        with _untouched(judged) as sums, in_float64(judged):
            return _compare(judged, loss_fn, widen(part), rows, cuts, sums, by_length)
    except Exception:  # the loss may insist on the model's own precision; if that is not it, it fails again
        with _untouched(judged) as sums:
            return _compare(judged, loss_fn, part, rows, cuts, sums, by_length)


@contextmanager
def _untouched(model: Model) -> Iterator[GradientSums]:
    """Gradients, buffers and random states are afterwards as they were."""
    state = Snapshot(model)
    sums = GradientSums(claims=False)  # the accumulators that are judged need the leaves
    try:
        sums.begin(model.parameters())
        yield sums
    finally:
        sums.restore()
        state.restore()


def _compare(
    model: Model,
    loss_fn: LossFunction,
    part: Any,
    rows: int,
    cuts: list[int],
    sums: GradientSums,
    by_length: dict[str, Any],
) -> Report:
    several = False

    def unsplit(watching: Any = nullcontext()) -> None:  # noqa: B008 - it keeps no state
        """Plain autograd, on purpose: nothing of what is being judged."""
        nonlocal several
        terms = read(loss_fn(part), rows).terms.values()
        several = sum(term.per is Per.OWN_COUNT for term in terms) > 1
        objective = torch.stack([term.weight * term.value / term.count for term in terms]).sum()
        sums.adopt([objective])
        with watching:
            objective.backward()

    def counts(piece: Any) -> dict[str, Any]:
        """What a user of several terms would give, from the loss itself."""
        terms = read(loss_fn(piece), rows).terms.items()
        return {name: term.count for name, term in terms if term.per is Per.OWN_COUNT}

    def split(pieces: int) -> None:
        accumulator = _Judged(model.members, num_micro_batches=pieces, on_nonfinite="keep", **by_length)
        accumulator.backward(loss_fn, part, counts=counts if several else None)

    start = Snapshot(model)
    whole = _gradients(model, unsplit)
    if not any(gradient.any() for gradient in whole.values()):
        raise BatchError(f"the gradient of these {rows} rows is zero everywhere: there is nothing to compare")
    by_cut: dict[int, dict[str, float]] = {}
    failure = None
    for pieces in cuts:
        start.restore()
        try:
            by_cut[pieces] = _errors(whole, _gradients(model, lambda: split(pieces)))  # noqa: B023
        except Exception as caught:  # the whole batch went well, so it is the split that this model does not bear
            by_cut[pieces] = dict.fromkeys(whole, math.inf)
            failure = f"{pieces} pieces: {type(caught).__name__}: {caught}"
    start.restore()
    unsplit(seen := _LeastPrecise())
    return Report.of(
        by_cut,
        dtype=str(seen.dtype).removeprefix("torch."),
        eps=torch.finfo(seen.dtype).eps,
        rows=rows,
        failure=failure,
    )


def _gradients(model: Model, run: Callable[[], None]) -> Gradients:
    """Each parameter's gradient after `run`; zeros where it has none."""
    named = {name: p for name, p in model.named_parameters().items() if p.requires_grad}
    for parameter in named.values():
        parameter.grad = None
    run()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        for name, parameter in named.items()
    }


def _errors(whole: Gradients, split: Gradients) -> dict[str, float]:
    """Each parameter's largest difference, over the largest entry of the model."""
    scale = max((_largest(gradient) for gradient in whole.values()), default=0.0)
    scale = scale if 0 < scale < math.inf else 1.0
    return {name: _largest(split[name] - whole[name]) / scale for name in whole}


def _largest(entries: Tensor) -> float:
    """The largest magnitude; infinite where an entry is not a number, so that comparisons do not lose it."""
    return entries.abs().nan_to_num(nan=math.inf, posinf=math.inf).max().item() if entries.numel() else 0.0


class _Judged(Accumulator):
    """Lets a wrong loss do what it would do, instead of refusing it."""

    def _statistics_to_pool(self, num_pieces: int) -> dict[str, Any]:
        return {}

    def _ignored_labels(self, batch: Any) -> Tensor | None:
        return None


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
