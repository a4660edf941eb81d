"""Finalise: the sums are divided once and clipped once.

gradient = before + factor · Σ_k ∇T_k
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from ._loss import Number
from ._sums import GradientSums, scale


@torch.no_grad()
def finalise(sums: GradientSums, factor: Number | Tensor, max_norm: float | None) -> Tensor | None:
    """Turn sums into gradients; returns their norm over the given parameters if they were to be clipped."""
    factor = sums.join(factor)
    if sums.unmerged:
        for gradients in sums.gradients():
            scale(gradients, factor)
        sums.merge()
        factor = 1
    given, adopted = sums.gradients()
    scale(adopted, factor)
    if max_norm is None:
        scale(given, factor)
        return None
    # One pass over the gradients divides and clips them; the norm of the quotient is the quotient of the norm.
    norm = norm_of(given) * factor
    scale(given, factor * torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def norm_of(gradients: list[Tensor], order: float = 2.0) -> Tensor:
    """The norm over all entries, in at least float32."""
    alike: dict[tuple[Any, ...], list[Tensor]] = {}
    for gradient in gradients:
        mesh = getattr(gradient, "device_mesh", None)  # of a DTensor
        alike.setdefault((gradient.device, gradient.dtype, mesh), []).append(_values(gradient))
    norms: list[Tensor] = []
    for (_, dtype, mesh), values in alike.items():
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        of_values = list(torch._foreach_norm(values, order, dtype=wide))
        norms += of_values if mesh is None else [_whole(get_total_norm(of_values, order))]
    return get_total_norm(norms, order)


def _whole(norm: Any) -> Tensor:
    """The norm over all parts of distributed tensors."""
    whole: Tensor = norm.full_tensor()
    return whole


def _values(gradient: Tensor) -> Tensor:
    """The entries that a norm sees; a sparse gradient may hold several for one place until they are added."""
    return gradient if gradient.layout == torch.strided else gradient.coalesce().values()
