"""The comparison that all numeric tests rest on fails where it should."""

import numpy as np
import pytest

from reference import assert_exact

WHOLE = {"weight": np.array([1.0, -2.0]), "bias": np.array([0.0])}


def test_equal_gradients_pass():
    assert_exact({"weight": np.array([1.0, -2.0 + 1e-13]), "bias": np.array([0.0])}, WHOLE)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": np.array([1.0, -2.0 + 1e-11]), "bias": np.array([0.0])},
        {"weight": np.array([1.0, np.nan]), "bias": np.array([0.0])},
        {"weight": np.array([1.0, -2.0])},
        {"weight": np.array([1.0, -2.0]), "bias": np.array(0.0)},
        {"weight": np.array([1.0, -2.0], np.float32), "bias": np.array([0.0])},
    ],
    ids=["off by 1e-11", "nan", "a name is missing", "another shape", "another dtype"],
)
def test_wrong_gradients_fail(wrong):
    with pytest.raises(AssertionError):
        assert_exact(wrong, WHOLE)


@pytest.mark.parametrize("useless", [0.0, np.nan])
def test_a_reference_that_proves_nothing_fails(useless):
    with pytest.raises(AssertionError):
        assert_exact({"weight": np.array([useless])}, {"weight": np.array([useless])})
