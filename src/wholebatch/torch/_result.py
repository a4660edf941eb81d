"""What one batch came to."""

from dataclasses import dataclass

from torch import Tensor

from ._loss import Count


@dataclass(frozen=True, slots=True)
class Result:
    """What one batch came to. Tensors are detached and on the device of the loss.

    Args:
        loss: the loss of the whole batch.
        terms: its terms by name, weighted as they enter the loss; `{"loss": ...}` for a single one.
        metrics: what the loss function reported besides, over the whole batch.
        count: what the loss was divided by, by name where there are several terms; 1 for a `Sum`.
        rows: rows of the batch; None where they cannot be told.
        num_micro_batches: the number of pieces.
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
