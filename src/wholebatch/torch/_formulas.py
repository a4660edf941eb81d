"""The gradients of the layers that add them in place.

    grad ← grad + gᵀ x              a linear layer: one matrix product with beta 1
    grad[i] ← grad[i] + g           an embedding: the rows that occurred

Sums may be wider than what is added to them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_HALVES = (torch.float16, torch.bfloat16)


class Formulas:
    """A kind of layer. `x` is what it is given, `g` the gradient of what it returns."""

    @staticmethod
    def output(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What the layer returns."""
        raise NotImplementedError

    @staticmethod
    def of_input(weight: Tensor, g: Tensor) -> Tensor | None:
        """The gradient of `x`; indices have none."""
        return None

    @staticmethod
    def of_weight(module: Any, x: Tensor, g: Tensor) -> Tensor:
        """The gradient of the weight by itself."""
        raise NotImplementedError

    @staticmethod
    def add(module: Any, sum: Tensor, x: Tensor, g: Tensor) -> None:
        """The gradient of the weight, added to another."""
        raise NotImplementedError


class Linear(Formulas):
    """y = x Wᵀ + b"""

    @staticmethod
    def output(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _linear(x, weight, bias)

    @staticmethod
    def of_input(weight: Tensor, g: Tensor) -> Tensor:
        return _linear(g, weight.t())

    @staticmethod
    def of_weight(module: Any, x: Tensor, g: Tensor) -> Tensor:
        return by_row(g).t() @ by_row(x)

    @staticmethod
    def add(module: Any, sum: Tensor, x: Tensor, g: Tensor) -> None:
        _add_product(sum, by_row(g).t(), by_row(x))


class Conv1D(Formulas):
    """y = x W + b"""

    @staticmethod
    def output(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _linear(x, weight.t(), bias)

    @staticmethod
    def of_input(weight: Tensor, g: Tensor) -> Tensor:
        return _linear(g, weight)

    @staticmethod
    def of_weight(module: Any, x: Tensor, g: Tensor) -> Tensor:
        return by_row(x).t() @ by_row(g)

    @staticmethod
    def add(module: Any, sum: Tensor, x: Tensor, g: Tensor) -> None:
        _add_product(sum, by_row(x).t(), by_row(g))


class Embedding(Formulas):
    """y = W[x]"""

    @staticmethod
    def output(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.embedding(x, weight, module.padding_idx)

    @staticmethod
    def of_weight(module: Any, x: Tensor, g: Tensor) -> Tensor:
        padding = -1 if module.padding_idx is None else module.padding_idx
        gradient: Tensor = torch.ops.aten.embedding_dense_backward(g, x, module.num_embeddings, padding, False)
        return gradient

    @staticmethod
    def add(module: Any, sum: Tensor, x: Tensor, g: Tensor) -> None:
        rows, indices = by_row(g).to(sum.dtype), x.reshape(-1)
        if module.padding_idx is not None:
            rows = rows.masked_fill((indices == module.padding_idx).unsqueeze(1), 0)
        if sum.device.type == "cpu":
            sum.index_add_(0, indices, rows)
        else:  # which adds in the same order each time, as autograd does
            sum.index_put_((indices,), rows, accumulate=True)


def by_row(tensor: Tensor) -> Tensor:
    """Rows of the last axis, whatever is before it."""
    return tensor.reshape(-1, tensor.shape[-1])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, where it is at hand by oneDNN: with few rows it takes half the time of MKL, which torch calls."""
    if _suits_onednn(x, weight):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return functional.linear(x, weight, bias)


def _suits_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether it can, and is faster; it has no derivative of its own, which a backward to be differentiated needs."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() > x.shape[-1]
        and not torch.is_grad_enabled()
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch._C._get_mkldnn_enabled()
    )


def _add_product(sum: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == sum.dtype:
        sum.addmm_(a, b)
    elif sum.is_cuda and not torch.version.hip and sum.dtype == torch.float32 and a.dtype in _HALVES:
        torch.addmm(sum, a, b, out_dtype=torch.float32, out=sum)
    else:
        sum.add_(a @ b)
