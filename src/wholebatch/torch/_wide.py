"""A model in float64 for a while, in place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ._gradients import set_grad_dtype
from ._model import Model
from ._tree import map_tensors

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


@contextmanager
def in_float64(model: Model) -> Iterator[None]:
    """Swap the contents of parameters and buffers for float64 copies, and swap them back at the end."""
    narrow: list[tuple[Tensor, Tensor, Tensor | None, torch.dtype | None]] = []
    buffers = [buffer for module in model.modules for buffer in module.buffers()]
    try:
        for tensor in [*model.parameters(), *buffers]:
            if tensor.dtype in _WIDE:
                narrow.append((tensor, tensor.data, tensor.grad, tensor.grad_dtype))
                tensor.grad = None
                tensor.data = widen(tensor.data)
                set_grad_dtype(tensor, tensor.dtype)
        yield
    finally:
        for tensor, data, gradient, grad_dtype in narrow:
            tensor.grad = None  # it has the wide dtype
            tensor.data = data
            set_grad_dtype(tensor, grad_dtype)
            tensor.grad = gradient


def widen(batch: Any) -> Any:
    """A batch, or a tensor, with its floating point tensors in float64."""
    return map_tensors(lambda tensor: tensor.to(_WIDE.get(tensor.dtype, tensor.dtype)), batch)
