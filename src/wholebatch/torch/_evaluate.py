"""Evaluate: the loss and metrics of a whole data set, batch by batch, exact however it is cut.

L = Σ total_i / Σ count_i
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import BatchError
from ._cut import rows_if_known, to_device
from ._ledger import Ledger
from ._loss import LossFunction, read
from ._model import Model, only_device
from ._processes import processes_of
from ._result import Result
from ._tokens import ignored_labels
from ._verdict import judge


@torch.no_grad()
def evaluate(
    model: nn.Module | Iterable[nn.Module] | Iterable[Tensor], loss_fn: LossFunction, loader: Iterable[Any]
) -> Result:
    """The loss over everything that a loader yields, in eval mode and without gradients.

    Args:
        model: as for `Accumulator`; every module is afterwards in the mode that it was in. Each process evaluates what
            its own loader yields.
        loss_fn: as for `Accumulator.backward`.
        loader: yields batches of any sizes.

    >>> model = torch.nn.Linear(4, 1)
    >>> x, y = torch.randn(50, 4), torch.randn(50, 1)
    >>> loader = zip(x.split(16), y.split(16))
    >>> evaluate(model, lambda b: torch.nn.functional.mse_loss(model(b[0]), b[1]), loader).rows
    50
    """
    evaluated = Model(model)
    device = only_device(evaluated.parameters())
    ledger = Ledger()
    any_ignored: Tensor | None = None
    with _eval_mode(evaluated.modules), processes_of(evaluated).apart():
        for batch in loader:
            rows = rows_if_known(batch)
            ledger.enter(read(loss_fn(to_device(batch, device)), rows), rows)
            ignored = ignored_labels(batch)
            any_ignored = ignored if any_ignored is None or ignored is None else any_ignored | ignored
    if not ledger.pieces:
        raise BatchError("the loader yielded nothing: there is nothing to evaluate")
    totals = ledger.totals()
    verdict = judge(totals, ignored_labels=any_ignored if ledger.counts_rows_only else None)
    return Result.of(totals, verdict, ledger.rows, ledger.pieces)


@contextmanager
def _eval_mode(modules: list[nn.Module]) -> Iterator[None]:
    modes = [(inner, inner.training) for module in modules for inner in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for inner, training in modes:
            inner.training = training
