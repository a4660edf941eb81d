"""Every loss form gives the gradient of the unsplit batch where its rows are shared by 2, 4 or 8 devices, in float64."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import jax_adapter as adapter
from conformance.cases import LOSSES, STRUCTURES, make_batch, make_params
from conformance.test_jax import assert_conforms
from reference import assert_exact

ROWS = 48  # of which the first, and so the first device's only one where there are as many, is fully masked


def over(devices, **cut):
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return {"data_axis": "data", "mesh": mesh} | cut


CUTS = {
    "4 devices, a remainder": (ROWS, over(4, micro_batch_size=20)),
    "8 devices with one row each": (8, over(8)),
    "2 devices, pieces": (ROWS, over(2, num_micro_batches=6)),
    "2 devices, one row each": (ROWS, over(2, micro_batch_size=2)),
    "4 devices, larger than the batch": (ROWS, over(4, micro_batch_size=64)),
    "8 devices, one piece": (ROWS, over(8)),
    "one device": (10, over(1, micro_batch_size=4)),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_every_loss_form(loss):
    assert_conforms(loss, ROWS, over(8, micro_batch_size=16), STRUCTURES["dict"])


@pytest.mark.parametrize(("rows", "cut"), CUTS.values(), ids=CUTS)
def test_every_cut(rows, cut):
    assert_conforms(LOSSES["one mean beside a scalar and a sum"], rows, cut, STRUCTURES["dict"])


@pytest.mark.parametrize("structure", [STRUCTURES["named tuple"], STRUCTURES["nested"]], ids=["named tuple", "nested"])
def test_every_structure(structure):
    assert_conforms(LOSSES["mean over masked tokens"], ROWS, over(4, micro_batch_size=20), structure)


@settings(max_examples=6)
@given(
    loss=st.sampled_from(sorted(LOSSES)),
    devices=st.sampled_from([2, 4, 8]),
    rows=st.integers(1, 4),
    size=st.integers(1, 5),
    kept=st.integers(0, 2**60 - 1),
)
def test_any_devices_rows_cut_and_mask(loss, devices, rows, size, kept):
    batch = make_batch(devices * rows)
    bits = [(kept >> i % 60) & 1 for i in range(batch["mask"].size)]
    batch["mask"] = np.array(bits, np.float64).reshape(batch["mask"].shape)
    batch["mask"][-1, -1] = 1.0  # a batch that counts nothing has its own tests
    cut = over(devices, micro_batch_size=devices * size)
    assert_conforms(LOSSES[loss], devices * rows, cut, STRUCTURES["dict"], batch)


@pytest.mark.parametrize("loss", ["mean over masked tokens", "weighted mean", "sum"])
def test_the_mean_over_devices_fails_the_same_comparison(loss):
    params, batch = make_params(), make_batch(ROWS)
    with jax.enable_x64(True):
        _, whole = adapter.whole(LOSSES[loss].whole, params, batch)
        wrong = adapter.naive_mean_of_means(LOSSES[loss].whole, params, batch, [ROWS // 4] * 4)
        with pytest.raises(AssertionError, match="is off by"):
            assert_exact(wrong, whole)
