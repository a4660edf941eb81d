"""PyTorch: pre-training of a language model, one weight update for every few micro-batches.

    one Adam step for  Σ_k (summed loss of micro-batch k) / Σ_k (predicted tokens of micro-batch k)

A language model's loss is a mean over tokens, and says so: `token_mean` is a ratio of two sums.
"""

import copy
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from wholebatch import BatchError
from wholebatch.torch import Accumulator, token_mean, windows

from ._agreement import ALLOWED, agree
from ._models import dtype_named, largest_difference

__all__ = ["LanguageModel", "main", "pretrain", "pretrain_on_whole_batches"]


class LanguageModel(nn.Sequential):
    """An embedding and a linear head: each token predicts the next one.

    Args:
        vocabulary: how many tokens there are.
        width: of the embedding.
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__(nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary))


def pretrain(
    model: nn.Module, micro_batches: Iterable[Tensor] | Tensor, lr: float, accumulation_steps: int
) -> list[tuple[int, float]]:
    """Pre-train with one update for every few micro-batches, and print a line at each.

    Args:
        model: predicts the next token of each.
        micro_batches: token ids of shape (sequences, length).
        lr: the learning rate of Adam.
        accumulation_steps: micro-batches for an update; the last one may have fewer.

    Returns:
        The micro-step and the loss of each update.

    >>> ids = torch.randint(50, (6, 2, 5))
    >>> updates = pretrain(LanguageModel(50, 8), ids, 1e-3, accumulation_steps=4)  # doctest: +ELLIPSIS
    step   4   loss ...
    step   6   loss ...
    """

    def loss_fn(ids: Tensor) -> object:
        return token_mean(model(ids), ids)

    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    accumulator = Accumulator(model)
    micro_step, updates = 0, []
    for window in windows(micro_batches, accumulation_steps):
        micro_step += len(window)
        loss = accumulator.step(loss_fn, window, optimizer).loss.item()
        print(f"step {micro_step:3}   loss {loss:.6f}")
        updates.append((micro_step, loss))
    if not updates:
        raise BatchError("there are no micro-batches to pre-train on")
    return updates


def pretrain_on_whole_batches(model: nn.Module, batches: Iterable[Tensor] | Tensor, lr: float) -> list[float]:
    """The same in plain PyTorch, on batches that fit; the loss of each update.

    Args:
        model: as for `pretrain`.
        batches: token ids of shape (sequences, length), one for each update.
        lr: as for `pretrain`.

    >>> len(pretrain_on_whole_batches(LanguageModel(50, 8), torch.randint(50, (3, 8, 5)), 1e-3))
    3
    """
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=lr), []
    for ids in batches:
        loss = functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(
    *,
    vocabulary: int = 1000,
    width: int = 128,
    length: int = 20,
    lr: float = 1e-3,
    micro_batch_size: int = 8,
    accumulation_steps: int = 4,
    micro_steps: int = 20,
    dtype: str = "float64",
    seed: int = 0,
) -> bool:
    """Pre-training on random tokens, by micro-batches and by whole batches.

    Args:
        vocabulary: how many tokens there are.
        width: of the embedding.
        length: tokens of a sequence.
        lr: the learning rate of Adam.
        micro_batch_size: sequences of a micro-batch.
        accumulation_steps: micro-batches for a weight update.
        micro_steps: micro-batches in all.
        dtype: float32 or float64.
        seed: of data and weights.
    """
    torch.manual_seed(seed)
    model = LanguageModel(vocabulary, width).to(dtype_named(dtype))
    twin = copy.deepcopy(model)
    ids = torch.randint(vocabulary, (micro_steps, micro_batch_size, length))

    updates = pretrain(model, ids, lr, accumulation_steps)
    whole = [window.flatten(0, 1) for window in ids.split(accumulation_steps)]
    losses = pretrain_on_whole_batches(twin, whole, lr)
    print(f"{len(updates)} updates, {micro_batch_size} sequences at a time; last loss {updates[-1][1]:.6f}")
    print(f"{len(losses)} updates, whole batches of {len(whole[0])}; last loss {losses[-1]:.6f}")
    # Adam divides a gradient by its own size: where it nearly vanishes, rounding becomes a part of a step
    allowed = lr / 100 if dtype == "float32" else ALLOWED[dtype]
    return agree("the weights", largest_difference(model, twin), allowed)


if __name__ == "__main__":
    sys.exit(not main())
