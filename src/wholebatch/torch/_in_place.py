"""In place: weight gradients are summed straight into `.grad`, where they are made.

    grad ← grad + gᵀ x              a linear layer: one matrix product with beta 1
    grad[i] ← grad[i] + g           an embedding: the rows that occurred

Autograd makes a temporary of the weight's size for each piece and takes another pass to add it to `.grad`; with small
pieces that is most of the time. While a batch is open the layers' `forward` is one whose backward adds instead, and
tells autograd that there is nothing left to add.

It steps aside, to the layer's own forward or to a gradient that autograd adds, wherever it would not do the same:
other types and dtypes, hooks that want to see the gradient, functional calls, a backward that is not the batch's own.
"""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ._model import Model
from ._sums import GradientSums

InPlace = bool | Literal["auto"]

WORTH_IT = 2**15
"""Entries of a weight from which on a pass over it costs more than a function written in Python."""


@contextmanager
def summing_in_place(model: Model, sums: GradientSums, least: int) -> Iterator[None]:
    """Within, layers whose weights have at least that many entries add their gradients to `.grad` themselves.

    Args:
        model: whose layers.
        sums: the batch whose backward may be added to.
        least: the fewest entries.
    """
    layers: list[nn.Module] = []
    try:
        for module in _layers(model.modules):
            kind = _kind(module)
            if kind is not None and sums.owns(module.weight) and module.weight.numel() >= least:
                layers.append(module)
                module.__dict__["forward"] = _Forward(kind, module, sums)
        yield
    finally:
        for module in layers:
            del module.__dict__["forward"]


def _layers(modules: list[nn.Module]) -> Iterator[nn.Module]:
    """All modules that run in Python under their own names; compiled, scripted and replicated ones do not."""
    waiting, seen = list(modules), set(modules)
    while waiting:
        module = waiting.pop()
        if isinstance(module, torch.jit.ScriptModule | nn.DataParallel) or _is_compiled(module):
            continue
        yield module
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_torchdynamo_orig_callable")


def _kind(module: Any) -> "type[_Layer] | None":
    """How the gradient of a layer's weight is summed; None where autograd does it."""
    forward = type(module).forward
    if "forward" in module.__dict__ or type(module._parameters.get("weight")) is not nn.Parameter:
        return None
    if forward is nn.Linear.forward:
        return _Linear
    if forward is nn.Embedding.forward:
        plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
        return _Embedding if plain else None
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None and forward is transformers.Conv1D.forward:
        return _Conv1D
    return None


class _Forward:
    """Stands in a layer for its `forward` while a batch is open. A copy of the layer gets its own forward back."""

    def __init__(self, kind: Any, module: nn.Module, sums: GradientSums) -> None:
        self._kind, self._module, self._sums = kind, module, sums
        self._weight = module.weight

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        module, weight = self._module, self._weight
        if len(args) == 1 and not kwargs and module.weight is weight and _is_plain(weight, args[0]):
            return self._kind.apply(args[0], weight, getattr(module, "bias", None), module, self._sums)
        return type(module).forward(module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return types.MethodType, (type(self._module).forward, self._module)


def _is_plain(weight: Tensor, given: Tensor) -> bool:
    """Whether autograd would record this call, and nobody else takes part in it."""
    return (
        type(given) in (Tensor, nn.Parameter)
        and torch.is_grad_enabled()
        and weight.requires_grad
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
        and not torch.is_autocast_enabled(weight.device.type)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


class _Layer(torch.autograd.Function):
    """A layer whose backward adds the gradient of its weight to `.grad`, if it is the batch's own backward."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, module: Any, sums: GradientSums
    ) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.module, ctx.sums = module, sums
        output: Tensor = type(module).forward(module, given)
        return output

    @classmethod
    def gradients(cls, ctx: Any, of_output: Tensor, of_input: Tensor | None) -> tuple[Tensor | None, ...]:
        """Those of the function's arguments; the weight's is None where it has been added."""
        given, weight = ctx.saved_tensors
        of_weight = None
        if not _may_add(ctx, weight, of_output):
            of_weight = cls.of_weight(ctx.module, given, of_output, weight)
        elif weight.grad is None:
            weight.grad = cls.of_weight(ctx.module, given, of_output, weight)
        else:
            cls.add(ctx.module, weight.grad, given, of_output)
        of_bias = of_output.reshape(-1, of_output.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, None, None

    @staticmethod
    def of_weight(module: Any, given: Tensor, of_output: Tensor, weight: Tensor) -> Tensor:
        """The gradient by itself."""
        raise NotImplementedError

    @staticmethod
    def add(module: Any, gradient: Tensor, given: Tensor, of_output: Tensor) -> None:
        """The gradient, added to another."""
        raise NotImplementedError


class _Linear(_Layer):
    """y = x Wᵀ + b"""

    @staticmethod
    def backward(ctx: Any, of_output: Tensor) -> Any:
        of_input = of_output @ ctx.saved_tensors[1] if ctx.needs_input_grad[0] else None
        return _Linear.gradients(ctx, of_output, of_input)

    @staticmethod
    def of_weight(module: Any, given: Tensor, of_output: Tensor, weight: Tensor) -> Tensor:
        return _by_row(of_output).t() @ _by_row(given)

    @staticmethod
    def add(module: Any, gradient: Tensor, given: Tensor, of_output: Tensor) -> None:
        gradient.addmm_(_by_row(of_output).t(), _by_row(given))


class _Conv1D(_Layer):
    """y = x W + b"""

    @staticmethod
    def backward(ctx: Any, of_output: Tensor) -> Any:
        of_input = of_output @ ctx.saved_tensors[1].t() if ctx.needs_input_grad[0] else None
        return _Conv1D.gradients(ctx, of_output, of_input)

    @staticmethod
    def of_weight(module: Any, given: Tensor, of_output: Tensor, weight: Tensor) -> Tensor:
        return _by_row(given).t() @ _by_row(of_output)

    @staticmethod
    def add(module: Any, gradient: Tensor, given: Tensor, of_output: Tensor) -> None:
        gradient.addmm_(_by_row(given).t(), _by_row(of_output))


class _Embedding(_Layer):
    """y = W[i]"""

    @staticmethod
    def backward(ctx: Any, of_output: Tensor) -> Any:
        return _Embedding.gradients(ctx, of_output, None)

    @staticmethod
    def of_weight(module: Any, given: Tensor, of_output: Tensor, weight: Tensor) -> Tensor:
        padding = -1 if module.padding_idx is None else module.padding_idx
        gradient: Tensor = torch.ops.aten.embedding_dense_backward(of_output, given, len(weight), padding, False)
        return gradient

    @staticmethod
    def add(module: Any, gradient: Tensor, given: Tensor, of_output: Tensor) -> None:
        rows, indices = _by_row(of_output), given.reshape(-1)
        if module.padding_idx is not None:
            rows = rows.masked_fill((indices == module.padding_idx).unsqueeze(1), 0)
        gradient.index_add_(0, indices, rows)


def _by_row(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _may_add(ctx: Any, weight: Tensor, of_output: Tensor) -> bool:
    """Whether this backward is one that autograd would add to `.grad` in, and with what it would add."""
    gradient = weight.grad
    if gradient is None:
        fits = weight.grad_dtype == of_output.dtype
    else:
        fits = gradient.dtype == of_output.dtype and gradient.layout == torch.strided
    return ctx.needs_input_grad[1] and fits and ctx.sums.running and _accumulates(ctx.next_functions[1][0])


def _accumulates(leaf: Any) -> bool:
    """Whether the engine is adding to a leaf's `.grad`; within a call of `autograd.grad` it is not."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # the leaf is what that call asks for
        return False
