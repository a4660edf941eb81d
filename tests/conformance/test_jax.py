"""Every loss form, structure and cut gives the gradient of the unsplit batch in JAX too, in float64.

The unsplit batch is torch's here, so that both front ends are held to one figure.
"""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import numpy as jnp

from conformance import jax_adapter as adapter
from conformance import torch_adapter
from conformance.cases import CUTS, LOSSES, ROWS, STRUCTURES, TOKENS, make_batch, make_params
from reference import assert_exact

PARAMS = make_params()


def assert_conforms(case, rows, cut, structure, batch=None):
    batch = make_batch(rows) if batch is None else batch
    with jax.enable_x64(True):
        loss, terms, metrics, split = adapter.split(case, PARAMS, batch, cut, structure)
        expected, whole = torch_adapter.whole(case.whole, PARAMS, batch)
        assert not split.pop("unused").any()  # JAX says zeros where torch says None
        assert_exact(split, whole)
        assert float(loss) == pytest.approx(expected, rel=1e-12)
        assert terms.keys() == set(case.terms or ["loss"])
        assert sum(map(float, terms.values())) == pytest.approx(expected, rel=1e-12)
        assert metrics.keys() == case.metrics.keys()
        for name, metric in case.metrics.items():
            if name == "row":  # a plain number is averaged with the objective's weights, tokens here
                continue
            expected = float(metric(adapter.to_jax(PARAMS), adapter.to_jax(batch), jnp))
            assert float(metrics[name]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_every_loss_form_under_every_cut(loss, cut):
    assert_conforms(loss, ROWS, cut, STRUCTURES["dict"])


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_every_structure(structure):
    for cut in (CUTS["4+3+3"], CUTS["even"]):
        assert_conforms(LOSSES["mean over masked tokens"], ROWS, cut, structure)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_one_row(loss):
    assert_conforms(loss, 1, {"micro_batch_size": 4}, STRUCTURES["dict"])


@settings(max_examples=20)
@given(
    loss=st.sampled_from(sorted(LOSSES)),
    rows=st.integers(1, 12),
    size=st.integers(1, 13),
    by_number=st.booleans(),
    kept=st.integers(0, 2**60 - 1),
    seed=st.integers(0, 3),
)
def test_any_rows_cut_mask_and_weights(loss, rows, size, by_number, kept, seed):
    batch = make_batch(rows, seed)
    bits = [(kept >> i) & 1 for i in range(batch["mask"].size)]
    batch["mask"] = np.array(bits, np.float64).reshape(batch["mask"].shape)
    batch["mask"][-1, -1] = 1.0  # a batch that counts nothing has its own tests
    cut = {"num_micro_batches" if by_number else "micro_batch_size": size}
    assert_conforms(LOSSES[loss], rows, cut, STRUCTURES["dict"], batch)


@pytest.mark.parametrize(
    ("loss", "sizes"),
    [("scalar", [4, 4, 2]), ("mean over masked tokens", [5, 5]), ("weighted mean", [5, 5]), ("sum", [5, 5])],
)
def test_the_naive_rule_fails_the_same_comparison(loss, sizes):
    batch = make_batch(ROWS)
    batch["mask"][:2] = np.eye(TOKENS)[0]  # few tokens in the first piece, but none that has no mean
    with jax.enable_x64(True):
        _, whole = adapter.whole(LOSSES[loss].whole, PARAMS, batch)
        wrong = adapter.naive_mean_of_means(LOSSES[loss].whole, PARAMS, batch, sizes)
        with pytest.raises(AssertionError, match="is off by"):
            assert_exact(wrong, whole)


def test_the_naive_rule_itself_is_right_where_pieces_are_equal():
    """Or the negative controls would fail for a reason of their own."""
    batch = make_batch(ROWS)
    with jax.enable_x64(True):
        _, whole = adapter.whole(LOSSES["scalar"].whole, PARAMS, batch)
        assert_exact(adapter.naive_mean_of_means(LOSSES["scalar"].whole, PARAMS, batch, [5, 5]), whole)
