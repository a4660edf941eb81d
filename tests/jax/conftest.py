"""JAX is tested in float64, which it only has where it is switched on; weak promotion is not relied on."""

import jax
import pytest


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield
