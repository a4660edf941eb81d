"""In place: weight gradients are summed straight into `.grad`, where they are made.

    grad ← grad + ∂L/∂W

Autograd makes a temporary of the weight's size for each piece and takes another pass to add it to `.grad`; with small
pieces and large weights that is most of the time. While a batch is open the layers' `forward` is one whose backward
adds instead, and tells autograd that there is nothing left to add.

Under autocast a layer's factors are cast as autocast would cast them, and their product is added in the sum's dtype.

It steps aside, to the layer's own forward or to a gradient that autograd adds, wherever it would not do the same:
other types, hooks that want to see the gradient, functional calls, a backward that is not the batch's own.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ._formulas import Conv1D, Embedding, Formulas, Linear, by_row
from ._model import Model
from ._sums import GradientSums, owner

InPlace = bool | Literal["auto"]

WORTH_IT = 2**18
"""Entries of a weight from which on a pass over it costs more than a backward written in Python."""

_PLAIN = (Tensor, nn.Parameter, FakeTensor)

_LINEAR, _EMBEDDING = nn.Linear.forward, nn.Embedding.forward  # whoever replaces them later means something else


@contextmanager
def summing_in_place(model: Model, sums: GradientSums, least: int) -> Iterator[None]:
    """Within, layers whose weights have at least that many entries add their gradients to `.grad` themselves.

    Args:
        model: whose layers.
        sums: the batch whose backward may be added to.
        least: the fewest entries.
    """
    layers: list[tuple[nn.Module, MethodType]] = []
    try:
        for module in _layers(model.modules):
            weight = module._parameters.get("weight")
            if weight is None or weight.numel() < least * _times(weight.device) or owner(weight) is not sums:
                continue
            forward = _forward_in_place(module, weight)
            if forward is not None:
                layers.append((module, MethodType(forward, module)))
                module.__dict__["forward"] = layers[-1][1]
        yield
    finally:
        for module, ours in layers:
            if module.__dict__.get("forward") is ours:
                del module.__dict__["forward"]


def _times(device: torch.device) -> int:
    """How many times more entries make it worth while, where memory is faster and each call costs the host as much."""
    return 1 if device.type == "cpu" else 64


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
    plain = type(weight) in _PLAIN and weight.layout == torch.strided and weight.is_floating_point()
    if "forward" in module.__dict__ or not plain:
        return None
    if own is _LINEAR:
        return _linear
    if own is _EMBEDDING:
        return _embedding if module.max_norm is None and not module.sparse and not module.scale_grad_by_freq else None
    transformers = sys.modules.get("transformers.pytorch_utils")
    return _conv1d if transformers is not None and own is transformers.Conv1D.forward else None


class _Layer(torch.autograd.Function):
    """A layer whose backward adds the gradient of its weight to `.grad`, if it is the batch's own backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        cast: Tensor,
        bias: Tensor | None,
        module: Any,
        formulas: type[Formulas],
    ) -> Tensor:
        ctx.save_for_backward(x, cast)
        ctx.weight, ctx.module, ctx.formulas = weight, module, formulas
        return formulas.output(module, x, cast, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, cast = ctx.saved_tensors  # asked for once: a checkpoint computes them for it
        weight = ctx.weight
        wants_x, wants_weight, _, wants_bias, *_ = ctx.needs_input_grad
        of_weight = None
        if wants_weight and not _may_add(ctx, weight, g):
            of_weight = ctx.formulas.of_weight(ctx.module, x, g)
        elif wants_weight and weight.grad is None:
            weight.grad = ctx.formulas.of_weight(ctx.module, x, g)
        elif wants_weight:
            ctx.formulas.add(ctx.module, weight.grad, x, g)
        of_x = ctx.formulas.of_input(cast, g) if wants_x else None
        return of_x, of_weight, None, by_row(g).sum(0) if wants_bias else None, None, None


def _standing_in(formulas: type[Formulas]) -> Callable[..., Tensor]:
    """One function for all layers of a kind and all batches: compilers guard on it, and pickle goes by its name."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Tensor:
        # a compiler sees no more than the layer's own forward
        if not torch.compiler.is_compiling() and len(args) == 1 and not kwargs and _takes_part(module.weight, args[0]):
            (x,), weight, bias = args, module.weight, getattr(module, "bias", None)
            cast, dtype = weight, _cast_to(x, weight)
            if dtype is not None:
                x, cast, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
            return _Layer.apply(x, weight, cast, bias, module, formulas)  # type: ignore[no-any-return, no-untyped-call]
        return type(module).forward(module, *args, **kwargs)  # type: ignore[no-any-return]

    return forward


_linear, _conv1d, _embedding = _standing_in(Linear), _standing_in(Conv1D), _standing_in(Embedding)


def _takes_part(weight: Any, given: Any) -> bool:
    """Whether autograd would record this call for an open batch."""
    return (
        type(given) in _PLAIN
        and torch.is_grad_enabled()
        and weight.requires_grad
        and owner(weight) is not None
        and not torch._C._are_functorch_transforms_active()
    )


def _cast_to(given: Tensor, weight: Tensor) -> torch.dtype | None:
    """What autocast would cast a layer's input and weight to, if it is on; it leaves indices and float64 alone."""
    kind = weight.device.type
    if not given.is_floating_point() or torch.float64 in (given.dtype, weight.dtype):
        return None
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def _may_add(ctx: Any, weight: Tensor, g: Tensor) -> bool:
    """Whether this backward is one that autograd would add to `.grad` in, and nobody else has a hand in it."""
    sums, gradient = owner(weight), weight.grad
    if gradient is None:
        fits = weight.grad_dtype == g.dtype
    else:
        fits = gradient.layout == torch.strided and gradient.device == g.device
    return (
        fits
        and sums is not None
        and sums.adding_on(g.device)
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
        and _accumulates(ctx.next_functions[1][0])
    )


def _accumulates(leaf: Any) -> bool:
    """Whether the engine is adding to a leaf's `.grad`; within a call of `autograd.grad` it is not."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # the leaf is what that call asks for
        return False
