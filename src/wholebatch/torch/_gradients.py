"""Arithmetic on gradients: dense, sparse or distributed, on any devices and in any dtypes."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from ._loss import Number


@torch.no_grad()
def scale(gradients: list[Tensor], factor: Number | Tensor) -> None:
    """Multiply in place."""
    if not isinstance(factor, Tensor) and factor == 1:
        return
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in map(_own_part, gradients):
        if gradient.layout == torch.strided:
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        else:
            gradient.mul_(factor)
    for (device, _), dense in alike.items():
        torch._foreach_mul_(dense, factor.to(device) if isinstance(factor, Tensor) else factor)


@torch.no_grad()
def norm_of(gradients: list[Tensor], order: float = 2.0) -> Tensor:
    """The norm over all entries, in at least float32."""
    alike: dict[tuple[Any, ...], list[Tensor]] = {}
    for gradient in gradients:
        mesh = getattr(gradient, "device_mesh", None)  # of a DTensor
        alike.setdefault((gradient.device, gradient.dtype, mesh), []).append(_values(gradient))
    norms: list[Tensor] = []  # each gradient's, or those of a mesh together
    for (_, dtype, mesh), values in alike.items():
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        of_values = list(torch._foreach_norm(values, order, dtype=wide))
        norms += of_values if mesh is None else [_whole(get_total_norm(of_values, order))]
    if not norms:
        return torch.tensor(0.0)
    whole: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), order)
    return whole


def _whole(norm: Any) -> Tensor:
    """The norm over all parts of distributed tensors."""
    whole: Tensor = norm.full_tensor()
    return whole


def _values(gradient: Tensor) -> Tensor:
    """The entries that a norm sees; a sparse gradient may hold several for one place until they are added."""
    return gradient if gradient.layout == torch.strided else gradient.coalesce().values()


def _own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, which is a part of it if it is a DTensor."""
    to_local = getattr(tensor, "to_local", None)  # the class takes long to import, who uses it has
    own: Tensor = tensor if to_local is None else to_local()
    return own


def copied(gradient: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A copy, in another dtype if one is given."""
    return gradient.to(dtype or gradient.dtype, copy=True)


def summed(gradient: Tensor, other: Tensor) -> Tensor:
    """In place, unless only `gradient` is sparse: then the result is dense."""
    if gradient.layout != torch.strided and other.layout == torch.strided:
        return other + gradient
    return gradient.add_(other)


def set_grad_dtype(leaf: Tensor, dtype: torch.dtype | None) -> None:
    """Only where it changes something: once set it no longer follows the leaf's own dtype."""
    if leaf.grad_dtype != dtype:
        leaf.grad_dtype = dtype
