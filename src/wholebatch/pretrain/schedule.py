"""The learning rate of each optimizer step: scaled to the batch, warmed up, and then half a cosine.

rate(n) = peak · n / W                                  for n <= W
rate(n) = peak · (1/10 + 9/10 · (1 + cos(π t)) / 2)     with t = (n - W) / (N - W)
"""

import math

from .._rates import scale_of
from .settings import Settings

LOWEST = 0.1


def learning_rate(settings: Settings, step: int) -> float:
    """The rate of a step, counted from 1; micro-batches do not count."""
    peak = settings.lr * scale_of(settings.lr_rule, settings.batch_size / settings.base_batch_size)
    if step <= settings.warmup:
        return peak * step / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return peak * (LOWEST + (1 - LOWEST) * (1 + math.cos(math.pi * progress)) / 2)
