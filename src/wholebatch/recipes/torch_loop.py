"""PyTorch: a training loop with accumulation, beside the one over whole batches.

    one optimizer step for  Σ_k (summed loss of micro-batch k) / Σ_k (rows of micro-batch k)

over the micro-batches of a window. The last window holds what is left, and is divided by that. Clipping and the scaler
of mixed precision come once per window, after its last micro-batch.
"""

import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wholebatch.torch import train, windows

from ._agreement import ALLOWED, agree
from ._models import dtype_named, largest_difference

__all__ = ["create_data", "main", "train_standard", "train_with_accumulation", "train_with_accumulation_and_amp"]

Data = Sequence[tuple[Tensor, Tensor]]


def create_data(num_samples: int, d_in: int, d_out: int, micro_batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """Random rows and their classes, from torch's generator, in micro-batches of which the last may be short.

    Args:
        num_samples: rows in all.
        d_in: features of a row.
        d_out: classes.
        micro_batch_size: rows of a micro-batch.

    >>> [len(x) for x, y in create_data(10, 3, 2, 4)]
    [4, 4, 2]
    """
    x, y = torch.randn(num_samples, d_in), torch.randint(d_out, (num_samples,))
    return list(zip(x.split(micro_batch_size), y.split(micro_batch_size), strict=True))


def train_standard(
    model: nn.Module, data: Data, lr: float, epochs: int, *, max_norm: float | None = None
) -> list[float]:
    """Train with one step for each element of the data; the mean loss over rows of each epoch.

    Args:
        model: classifies rows.
        data: batches.
        lr: the learning rate of SGD.
        epochs: how often the data is read.
        max_norm: clip each gradient to this norm.

    >>> losses = train_standard(nn.Linear(3, 2), create_data(10, 3, 2, 4), 0.1, epochs=2)
    >>> len(losses)
    2
    """
    return _train(model, data, lr, epochs, max_norm=max_norm)


def train_with_accumulation(
    model: nn.Module, data: Data, lr: float, epochs: int, accumulation_steps: int, *, max_norm: float | None = None
) -> list[float]:
    """Train with one step for every few micro-batches; the mean loss over rows of each epoch.

    Args:
        model: classifies rows.
        data: micro-batches.
        lr: the learning rate of SGD.
        epochs: how often the data is read.
        accumulation_steps: micro-batches for a step; an epoch's last step may have fewer.
        max_norm: clip each step's gradient to this norm.

    >>> losses = train_with_accumulation(nn.Linear(3, 2), create_data(10, 3, 2, 4), 0.1, 1, accumulation_steps=2)
    >>> len(losses)
    1
    """
    return _train(model, data, lr, epochs, max_norm=max_norm, accumulation_steps=accumulation_steps)


def train_with_accumulation_and_amp(
    model: nn.Module, data: Data, lr: float, epochs: int, accumulation_steps: int, *, max_norm: float | None = None
) -> list[float]:
    """The same under float16 autocast. A step that the scaler skips is not in the mean loss.

    Args:
        model: as for `train_with_accumulation`.
        data: as for `train_with_accumulation`.
        lr: as for `train_with_accumulation`.
        epochs: as for `train_with_accumulation`.
        accumulation_steps: as for `train_with_accumulation`.
        max_norm: as for `train_with_accumulation`; gradients are unscaled before.

    >>> losses = train_with_accumulation_and_amp(nn.Linear(3, 2), create_data(10, 3, 2, 4), 0.1, 1, 2)
    >>> len(losses)
    1
    """
    device = next(model.parameters()).device.type
    # torch's own first scale, 2^16, overflows float16 where a gradient reaches 1, and skips steps until it has shrunk
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    return _train(
        model,
        data,
        lr,
        epochs,
        max_norm=max_norm,
        accumulation_steps=accumulation_steps,
        precision="fp16",
        scaler=scaler,
    )


def _train(model: nn.Module, data: Data, lr: float, epochs: int, **options: Any) -> list[float]:
    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        x, y = piece
        return functional.cross_entropy(model(x), y)

    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return train(model, data, optimizer, loss_fn, epochs=epochs, progress=False, **options).epoch_losses


def whole_batches(data: Data, accumulation_steps: int) -> list[tuple[Tensor, Tensor]]:
    """The batches that windows of micro-batches make.

    >>> [len(x) for x, y in whole_batches(create_data(10, 3, 2, 4), 2)]
    [8, 2]
    """
    return [
        (torch.cat([x for x, _ in window]), torch.cat([y for _, y in window]))
        for window in windows(data, accumulation_steps)
    ]


def main(
    *,
    num_samples: int = 70,
    d_in: int = 16,
    d_out: int = 4,
    micro_batch_size: int = 8,
    accumulation_steps: int = 4,
    epochs: int = 5,
    lr: float = 0.5,
    dtype: str = "float32",
    seed: int = 0,
) -> bool:
    """The same model trained on the same data, by whole batches and by their micro-batches.

    Args:
        num_samples: rows in all.
        d_in: features of a row.
        d_out: classes.
        micro_batch_size: rows of a micro-batch.
        accumulation_steps: micro-batches for a step.
        epochs: how often the data is read.
        lr: the learning rate of SGD.
        dtype: float32 or float64.
        seed: of data and weights.
    """
    torch.manual_seed(seed)
    standard = nn.Sequential(nn.Linear(d_in, 32), nn.Tanh(), nn.Linear(32, d_out)).to(dtype_named(dtype))
    accumulated = copy.deepcopy(standard)
    data = [(x.to(dtype_named(dtype)), y) for x, y in create_data(num_samples, d_in, d_out, micro_batch_size)]
    whole = whole_batches(data, accumulation_steps)

    one = train_standard(standard, whole, lr, epochs)
    other = train_with_accumulation(accumulated, data, lr, epochs, accumulation_steps)
    print(f"batches of {', '.join(str(len(x)) for x, _ in whole)} rows; micro-batches of at most {micro_batch_size}")
    print("epoch   whole batches   accumulated")
    for epoch, losses in enumerate(zip(one, other, strict=True), start=1):
        print(f"{epoch:5} {losses[0]:15.8f} {losses[1]:13.8f}")
    losses_agree = agree("the losses", max(abs(a - b) for a, b in zip(one, other, strict=True)), ALLOWED[dtype])
    return agree("the weights", largest_difference(standard, accumulated), ALLOWED[dtype]) and losses_agree


if __name__ == "__main__":
    sys.exit(not main())
