"""Token losses: the language-model loss as a ratio, and the trap of reading it as a mean over rows."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from .._errors import LossError
from .._mean import Mean
from ._cut import IGNORED
from ._tree import tensors
from ._window import Window


def token_mean(logits: Tensor, labels: Tensor, *, shift: bool = True, ignore_index: int = IGNORED) -> Mean:
    """The mean cross-entropy over the tokens that count, as a ratio.

    Args:
        logits: scores of shape (..., sequence, vocabulary).
        labels: token ids of shape (..., sequence).
        shift: position t predicts token t + 1, as causal language models do; the last position predicts
            nothing. With False, position t predicts token t.
        ignore_index: the label of tokens that do not count.

    >>> logits, labels = torch.zeros(1, 3, 7), torch.tensor([[4, 2, -100]])
    >>> token_mean(logits, labels).count
    tensor(1)
    """
    if logits.shape[:-1] != labels.shape:
        raise LossError(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} do not match: logits need the "
            "shape of the labels and one more axis for the vocabulary"
        )
    if shift:  # the labels move instead of the logits, which are far larger
        labels = functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    total = functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=ignore_index, reduction="sum"
    )
    return Mean(total, (labels != ignore_index).sum())


def ignored_labels(batch: Any) -> Tensor | None:
    """Whether the batch's labels hold -100, as a flag on their device; None if it has no labels."""
    pieces = batch if isinstance(batch, Window) else [batch]
    flags = [
        (tensor == IGNORED).any()
        for piece in pieces
        for path, tensor in tensors(piece)
        if path.endswith(('["labels"]', ".labels"))
    ]
    return torch.stack(flags).any() if flags else None


def refuse_ignored_labels() -> NoReturn:
    """A mean over tokens, split by rows, is the commonest bug of gradient accumulation."""
    raise LossError(
        'the loss is a scalar, read as a mean over rows, but the batch\'s "labels" hold -100: it is a mean over '
        "tokens, and pieces hold different numbers of them. Return token_mean(logits, labels) or "
        "Mean(summed_loss, tokens) instead; for a transformers model, token_mean(model(...).logits, labels) "
        "or Mean(model(**batch, num_items_in_batch=1).loss, tokens)"
    )
