"""In place: weight gradients are summed straight into `.grad`, where they are made.

    grad ← grad + gᵀ x              a linear layer: one matrix product with beta 1
    grad[i] ← grad[i] + g           an embedding: the rows that occurred

Autograd makes a temporary of the weight's size for each piece and takes another pass to add it to `.grad`; with small
pieces and large weights that is most of the time. While a batch is open the layers' `forward` is one whose backward
adds instead, and tells autograd that there is nothing left to add.

It steps aside, to the layer's own forward or to a gradient that autograd adds, wherever it would not do the same:
other types and dtypes, hooks that want to see the gradient, functional calls, a backward that is not the batch's own.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ._model import Model
from ._sums import GradientSums, owner

InPlace = bool | Literal["auto"]

WORTH_IT = 2**20
"""Entries of a weight from which on a pass over it costs more than a backward written in Python."""

_PLAIN = (Tensor, nn.Parameter, FakeTensor)


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
            weight = module._parameters.get("weight")
            if weight is None or weight.numel() < least or owner(weight) is not sums:
                continue
            forward = _forward_in_place(module, weight)
            if forward is not None:
                layers.append(module)
                module.__dict__["forward"] = MethodType(forward, module)
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


def _forward_in_place(module: Any, weight: Tensor) -> Callable[..., Tensor] | None:
    """What stands in for the forward of a layer whose weight's gradient can be summed here."""
    own = type(module).forward
    if "forward" in module.__dict__ or type(weight) not in _PLAIN or not weight.is_floating_point():
        return None
    if own is nn.Linear.forward:
        return _linear
    if own is nn.Embedding.forward:
        return _embedding if module.max_norm is None and not module.sparse and not module.scale_grad_by_freq else None
    transformers = sys.modules.get("transformers.pytorch_utils")
    return _conv1d if transformers is not None and own is transformers.Conv1D.forward else None


class Formulas:
    """The gradients of a kind of layer. `x` is what it was given, `g` the gradient of what it returned."""

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


class _Linear(Formulas):
    """y = x Wᵀ + b"""

    @staticmethod
    def of_input(weight: Tensor, g: Tensor) -> Tensor:
        return g @ weight

    @staticmethod
    def of_weight(module: Any, x: Tensor, g: Tensor) -> Tensor:
        return _by_row(g).t() @ _by_row(x)

    @staticmethod
    def add(module: Any, sum: Tensor, x: Tensor, g: Tensor) -> None:
        sum.addmm_(_by_row(g).t(), _by_row(x))


class _Conv1D(Formulas):
    """y = x W + b"""

    @staticmethod
    def of_input(weight: Tensor, g: Tensor) -> Tensor:
        return g @ weight.t()

    @staticmethod
    def of_weight(module: Any, x: Tensor, g: Tensor) -> Tensor:
        return _by_row(x).t() @ _by_row(g)

    @staticmethod
    def add(module: Any, sum: Tensor, x: Tensor, g: Tensor) -> None:
        sum.addmm_(_by_row(x).t(), _by_row(g))


class _Embedding(Formulas):
    """y = W[x]"""

    @staticmethod
    def of_weight(module: Any, x: Tensor, g: Tensor) -> Tensor:
        padding = -1 if module.padding_idx is None else module.padding_idx
        gradient: Tensor = torch.ops.aten.embedding_dense_backward(g, x, module.num_embeddings, padding, False)
        return gradient

    @staticmethod
    def add(module: Any, sum: Tensor, x: Tensor, g: Tensor) -> None:
        rows, indices = _by_row(g), x.reshape(-1)
        if module.padding_idx is not None:
            rows = rows.masked_fill((indices == module.padding_idx).unsqueeze(1), 0)
        sum.index_add_(0, indices, rows)


class _Layer(torch.autograd.Function):
    """A layer whose backward adds the gradient of its weight to `.grad`, if it is the batch's own backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: Any, formulas: type[Formulas]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module, ctx.formulas = module, formulas
        y: Tensor = type(module).forward(module, x)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors  # asked for once: a checkpoint computes them for it
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        of_weight = None
        if wants_weight and not _may_add(ctx, weight, g):
            of_weight = ctx.formulas.of_weight(ctx.module, x, g)
        elif wants_weight and weight.grad is None:
            weight.grad = ctx.formulas.of_weight(ctx.module, x, g)
        elif wants_weight:
            ctx.formulas.add(ctx.module, weight.grad, x, g)
        of_x = ctx.formulas.of_input(weight, g) if wants_x else None
        return of_x, of_weight, _by_row(g).sum(0) if wants_bias else None, None, None


def _standing_in(formulas: type[Formulas]) -> Callable[..., Tensor]:
    """One function for all layers of a kind and all batches: compilers guard on it, and pickle goes by its name."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Tensor:
        # a compiler sees no more than the layer's own forward
        if not torch.compiler.is_compiling() and len(args) == 1 and not kwargs and _takes_part(module.weight, args[0]):
            bias = getattr(module, "bias", None)
            return _Layer.apply(args[0], module.weight, bias, module, formulas)  # type: ignore[no-any-return, no-untyped-call]
        return type(module).forward(module, *args, **kwargs)  # type: ignore[no-any-return]

    return forward


_linear, _conv1d, _embedding = _standing_in(_Linear), _standing_in(_Conv1D), _standing_in(_Embedding)


def _takes_part(weight: Any, given: Any) -> bool:
    """Whether autograd would record this call for an open batch, and nobody else has a hand in it."""
    return (
        type(given) in _PLAIN
        and torch.is_grad_enabled()
        and weight.requires_grad
        and owner(weight) is not None
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
        and not torch.is_autocast_enabled(weight.device.type)
        and not torch._C._are_functorch_transforms_active()
    )


def _may_add(ctx: Any, weight: Tensor, g: Tensor) -> bool:
    """Whether this backward is one that autograd would add to `.grad` in, and with what it would add."""
    sums, gradient = owner(weight), weight.grad
    if gradient is None:
        fits = weight.grad_dtype == g.dtype
    else:
        fits = gradient.dtype == g.dtype and gradient.layout == torch.strided
    return fits and sums is not None and sums.adding_on(g.device) and _accumulates(ctx.next_functions[1][0])


def _accumulates(leaf: Any) -> bool:
    """Whether the engine is adding to a leaf's `.grad`; within a call of `autograd.grad` it is not."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # the leaf is what that call asks for
        return False


def _by_row(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
