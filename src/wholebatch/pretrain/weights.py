"""The weights that a seed stands for, under names that both frameworks share.

A linear layer's weight has the shape (outputs, inputs), as in PyTorch; checkpoints hold weights like that.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .sampling import WEIGHTS, random_of
from .settings import Settings

Weights = dict[str, npt.NDArray[Any]]

SPREAD = 0.02


def shapes(settings: Settings, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Every weight of the model, in order; the head is the token embedding."""
    width = settings.width

    def norm(name: str) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (width,), f"{name}.bias": (width,)}

    def linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

    every: dict[str, tuple[int, ...]] = {"tokens.weight": (vocabulary, width)}
    every["positions.weight"] = (settings.seq_len, width)
    for i in range(settings.layers):
        block = f"blocks.{i}"
        every |= norm(f"{block}.before_attention") | linear(f"{block}.qkv", width, 3 * width)
        every |= linear(f"{block}.out", width, width) | norm(f"{block}.before_mlp")
        every |= linear(f"{block}.up", width, 4 * width) | linear(f"{block}.down", 4 * width, width)
    return every | norm("norm")


def initial(settings: Settings, vocabulary: int) -> Weights:
    """Normal with a small spread, smaller where blocks add up; norms start as the identity."""
    random = random_of(settings.seed, WEIGHTS)
    dtype = np.float64 if settings.precision == "fp64" else np.float32
    weights: Weights = {}
    for name, shape in shapes(settings, vocabulary).items():
        if len(shape) == 1:
            weights[name] = np.full(shape, "norm" in name or "before" in name, dtype) * name.endswith("weight")
        else:
            adds_up = name.endswith(("out.weight", "down.weight"))
            spread = SPREAD / math.sqrt(2 * settings.layers) if adds_up else SPREAD
            weights[name] = (spread * random.standard_normal(shape)).astype(dtype)
    return weights


def is_decayed(name: str, array: Any) -> bool:
    """Whether weight decay is for it: matrices, not biases and norms."""
    return bool(array.ndim > 1)
