"""What one batch came to."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ._loss import Count
from ._totals import Totals
from ._verdict import Verdict


@dataclass(frozen=True, slots=True)
class Result:
    """What one batch came to, in all processes. Tensors are detached and on the device of the loss.

    Args:
        loss: the loss of the whole batch.
        terms: its terms by name, weighted as they enter the loss; `{"loss": ...}` for a single one.
        metrics: what the loss function reported besides, over the whole batch.
        count: what the loss was divided by, by name where there are several terms; 1 for a `Sum`.
        rows: rows of the batch; None where they cannot be told.
        num_micro_batches: the number of pieces of this process.
        grad_norm: norm of the gradient before clipping; None where it was not needed.
        stepped: whether the optimizer took its step.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    metrics: dict[str, Tensor]
    count: Count | dict[str, Count]
    rows: int | None
    num_micro_batches: int
    grad_norm: Tensor | None
    stepped: bool

    @classmethod
    def of(
        cls, totals: Totals, verdict: Verdict, rows: int | None, num_pieces: int, grad_norm: Tensor | None = None
    ) -> Self:
        """The result of a batch that has taken no step."""
        terms = {name: term.ratio for name, term in totals.terms.items()}
        only = next(iter(terms)) if len(terms) == 1 else None
        return cls(
            loss=torch.stack(list(terms.values())).sum() if only is None else terms[only],
            terms=terms,
            metrics={name: metric.ratio for name, metric in totals.metrics.items()},
            count=verdict.counts if only is None else verdict.counts[only],
            rows=rows,
            num_micro_batches=num_pieces,
            grad_norm=grad_norm,
            stepped=False,
        )
