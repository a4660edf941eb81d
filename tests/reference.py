"""What every numeric test compares with: the gradient of the batch in one piece, by plain autograd.

Exact means: in float64, the largest absolute difference of any gradient entry, over the largest gradient
entry of the model, is at most 1e-12.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

EXACT = 1e-12


def assert_exact(split: Mapping[str, Any], whole: Mapping[str, Any], tolerance: float = EXACT) -> None:
    """Raise unless two sets of gradients agree: the same names, shapes and dtypes, and the same entries."""
    assert split.keys() == whole.keys(), f"names differ: {sorted(split.keys() ^ whole.keys())}"
    scale = 0.0
    for name, expected in whole.items():
        actual, expected = np.asarray(split[name]), np.asarray(expected)
        assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, expected {expected.shape}"
        assert actual.dtype == expected.dtype, f"{name}: dtype {actual.dtype}, expected {expected.dtype}"
        assert np.isfinite(expected).all(), f"{name}: the reference is not finite"
        scale = max(scale, float(np.abs(expected).max(initial=0.0)))
    assert scale > 0, "the reference is all zeros: nothing would be compared"
    for name, expected in whole.items():
        difference = np.abs(np.asarray(split[name]) - np.asarray(expected)).max(initial=0.0)
        assert difference <= tolerance * scale, (
            f"{name} is off by {difference / scale:.2e} of the largest entry, {tolerance:.0e} is allowed"
        )
