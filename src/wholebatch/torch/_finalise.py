"""Finalise: the sums are divided once and clipped once.

gradient = before + factor · Σ_k ∇T_k
"""

import torch
from torch import Tensor

from ._gradients import norm_of, scale
from ._loss import Number
from ._sums import GradientSums


@torch.no_grad()
def finalise(sums: GradientSums, factor: Number | Tensor, max_norm: float | None) -> Tensor | None:
    """Turn sums into gradients; returns their norm over the given parameters if they were to be clipped."""
    factor = sums.merge(sums.join(factor))
    given, adopted = sums.gradients()
    scale(adopted, factor)
    if max_norm is None:
        scale(given, factor)
        return None
    # One pass over the gradients divides and clips them; the norm of the quotient is the quotient of the norm.
    norm = norm_of(given)
    scale([norm], factor)
    clipping = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    scale([clipping], factor)
    scale(given, clipping)
    return norm
