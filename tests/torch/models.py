"""Small models and losses that the tests share, in float64, with the unsplit gradient beside them."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROWS = 10


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def make_data(rows: int = ROWS, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (rows,), generator=generator)


def make_loss(model: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    """The mean cross-entropy over the rows of `(x, y)`."""

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        x, y = piece
        return nn.functional.cross_entropy(model(x), y)

    return loss_fn


def take_gradients(owner: nn.Module | Iterable[tuple[str, Tensor]]) -> dict[str, np.ndarray]:
    """Copies of the gradients by name, which are then cleared."""
    named = owner.named_parameters() if isinstance(owner, nn.Module) else owner
    taken = {}
    for name, parameter in named:
        if parameter.grad is not None:
            taken[name] = parameter.grad.to_dense().detach().clone().resolve_conj().numpy()
        parameter.grad = None
    return taken


def whole_gradients(model: nn.Module, objective: Callable[[], Tensor]) -> dict[str, np.ndarray]:
    """Plain autograd's gradients of an objective over the unsplit batch; `.grad` is left clear."""
    model.zero_grad()
    objective().backward()
    return take_gradients(model)
