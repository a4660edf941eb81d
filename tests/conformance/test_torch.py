"""Every loss form, structure and cut gives the gradient of the unsplit batch, in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import torch_adapter as adapter
from conformance.cases import (
    CUTS,
    DATACLASSES,
    LOSSES,
    MAPPINGS,
    ROWS,
    STRUCTURES,
    TOKENS,
    make_batch,
    make_params,
)
from reference import assert_exact
from wholebatch.torch import check

PARAMS = make_params()
NEEDS_COUNTS_BEFOREHAND = ("two means with counts of their own", "one mean beside a scalar and a sum")
ALL_STRUCTURES = STRUCTURES | DATACLASSES | MAPPINGS


def assert_conforms(case, rows, cut, structure, batch=None):
    batch = make_batch(rows) if batch is None else batch
    result, split = adapter.split(case, PARAMS, batch, cut, structure)
    loss, whole = adapter.whole(case.whole, PARAMS, batch)
    assert_exact(split, whole)
    assert result.loss.item() == pytest.approx(loss, rel=1e-12)
    assert result.rows == rows
    if case.terms:
        assert tuple(result.terms) == case.terms
        assert sum(term.item() for term in result.terms.values()) == pytest.approx(loss, rel=1e-12)
    plain = {name: torch.tensor(array) for name, array in PARAMS.items()}
    for name, metric in case.metrics.items():
        expected = float(metric(plain, adapter.to_torch(batch), torch))
        assert result.metrics[name].item() == pytest.approx(expected, rel=1e-12)
    assert result.metrics.keys() == case.metrics.keys()


@pytest.mark.parametrize("structure", ALL_STRUCTURES.values(), ids=ALL_STRUCTURES)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_every_loss_form_in_every_structure_under_every_cut(loss, structure):
    for cut in CUTS.values():
        assert_conforms(loss, ROWS, cut, structure)


@pytest.mark.parametrize("sizes", [[4, 4, 2], [1, 9], [10], [3, 0, 7]], ids=str)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_every_loss_form_in_a_window(loss, sizes):
    assert_conforms(loss, ROWS, {}, adapter.windowed(sizes))


@pytest.mark.parametrize("sizes", [[4, 4, 2], [1, 9], [10]], ids=str)
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in NEEDS_COUNTS_BEFOREHAND])
def test_every_loss_form_piece_by_piece(name, sizes):
    batch = make_batch(ROWS)
    result, split = adapter.added(LOSSES[name], PARAMS, batch, sizes)
    loss, whole = adapter.whole(LOSSES[name].whole, PARAMS, batch)
    assert_exact(split, whole)
    assert result.loss.item() == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_one_row(loss):
    assert_conforms(loss, 1, {"micro_batch_size": 4}, STRUCTURES["dict"])


@settings(max_examples=60)
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
    ("naive", "loss", "sizes"),
    [
        (adapter.naive_mean_of_means, "scalar", [4, 4, 2]),
        (adapter.naive_mean_of_means, "mean over masked tokens", [5, 5]),
        (adapter.naive_mean_of_means, "weighted mean", [5, 5]),
        (adapter.naive_mean_of_means, "sum", [5, 5]),
        (adapter.naive_full_count, "scalar", [5, 5]),
    ],
)
def test_the_naive_rules_fail_the_same_comparison(naive, loss, sizes):
    batch = make_batch(ROWS)
    batch["mask"][:2] = np.eye(TOKENS)[0]  # few tokens in the first piece, but none that has no mean
    _, whole = adapter.whole(LOSSES[loss].whole, PARAMS, batch)
    wrong = naive(LOSSES[loss].whole, PARAMS, batch, sizes)
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(wrong, whole)


def test_the_naive_loop_itself_is_right_where_pieces_are_equal():
    """Or the negative controls would fail for a reason of their own."""
    batch = make_batch(ROWS)
    _, whole = adapter.whole(LOSSES["scalar"].whole, PARAMS, batch)
    assert_exact(adapter.naive_mean_of_means(LOSSES["scalar"].whole, PARAMS, batch, [5, 5]), whole)


def checked(loss):
    leaves, batch = adapter.make_leaves(PARAMS), adapter.to_torch(make_batch(ROWS))
    return check(leaves.values(), lambda piece: loss(leaves, piece, torch), batch)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_check_finds_every_loss_form_exact(loss):
    report = checked(loss.split)
    assert report.exact
    assert report.cause is None


@pytest.mark.parametrize("name", LOSSES)
def test_check_says_what_is_wrong_with_the_same_as_one_scalar(name):
    """The objective of the whole is what a script returns that knows no ratios; the first row has no tokens."""
    by_rows, sums = ("scalar", "mean over rows"), ("sum", "scalar and sum")
    cause = checked(LOSSES[name].whole).cause
    assert cause == (None if name in by_rows else "sum-as-mean" if name in sums else "mean-of-means")
