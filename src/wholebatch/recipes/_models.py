"""What the torch recipes compare."""

import torch
from torch import nn

from wholebatch import OptionError

from ._agreement import ALLOWED


def dtype_named(name: str) -> torch.dtype:
    """A dtype that results can be compared in."""
    if name not in ALLOWED:
        raise OptionError(f"dtype must be {' or '.join(ALLOWED)}, got {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Of any weight, between two models of one kind."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)
