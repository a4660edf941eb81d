"""A loss as a ratio: weighting, masking, and no addition."""

import copy
import pickle

import numpy as np
import pytest

from wholebatch import LossTypeError, Mean, Sum, WholeBatchError


def test_value_is_total_over_count():
    assert Mean(6.0, 4).value == 1.5
    assert Sum(6.0).value == 6.0


@pytest.mark.parametrize("weight", [0.5, np.float64(0.5), np.float32(0.5)], ids=["float", "float64", "float32"])
def test_a_weight_scales_the_total_and_not_the_count(weight):
    for weighted in (weight * Mean(6.0, 4), Mean(6.0, 4) * weight):
        assert isinstance(weighted, Mean)
        assert (weighted.total, weighted.count) == (3.0, 4)
    assert (weight * Sum(6.0)).total == (Sum(6.0) * weight).total == 3.0


def test_division_and_negation_scale_too():
    assert (Mean(6.0, 4) / 2).total == 3.0
    assert (-Mean(6.0, 4)).total == -6.0
    assert (-Sum(6.0) / 3).total == -2.0


@pytest.mark.parametrize("one", [Mean(1.0, 2), Sum(1.0)], ids=["mean", "sum"])
@pytest.mark.parametrize("other", [Mean(1.0, 2), Sum(1.0), 0, 1.0], ids=["mean", "sum", "zero", "number"])
def test_addition_is_refused_and_points_to_a_mapping(one, other):
    for add in (lambda: one + other, lambda: other + one, lambda: one - other, lambda: other - one):
        with pytest.raises(LossTypeError, match=r"Return a mapping instead, such as {\"nll\": Mean"):
            add()


def test_terms_cannot_be_multiplied_by_terms():
    for wrong in (lambda: Mean(1.0, 2) * Mean(1.0, 2), lambda: Sum(1.0) / Mean(1.0, 2)):
        with pytest.raises(TypeError):
            wrong()


def test_mean_of_counts_every_item():
    mean = Mean.of(np.arange(6.0).reshape(2, 3))
    assert (mean.total, mean.count) == (15.0, 6)
    assert type(mean.count) is int


def test_mean_of_leaves_out_what_the_mask_leaves_out_even_if_it_is_not_finite():
    mean = Mean.of(np.array([1.0, np.nan, 3.0, np.inf]), where=np.array([True, False, True, False]))
    assert (mean.total, mean.count) == (4.0, 2)


def test_mean_of_reads_a_mask_of_numbers_as_weights():
    assert Mean.of(np.array([1.0, 2.0, 3.0]), where=np.array([1, 0, 1])).value == 2.0
    assert Mean.of(np.array([1.0, 2.0]), where=np.array([0.5, 1.5])).value == (0.5 + 3.0) / 2


def test_mean_of_nothing_has_count_zero():
    mean = Mean.of(np.array([1.0, 2.0]), where=np.array([False, False]))
    assert (mean.total, mean.count) == (0.0, 0)


def test_sums_of_16_bits_are_taken_in_float32():
    ones = np.ones(5000, np.float16)  # 2048 + 1 is 2048 in float16
    assert Mean.of(ones).total == 5000
    assert Mean.of(ones).total.dtype == np.float32
    assert Mean.of(ones, where=ones).count == 5000


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(LossTypeError, match=r"where has shape \(2,\), values have \(3,\)"):
        Mean.of(np.ones(3), where=np.ones(2))


@pytest.mark.parametrize("term", [Mean(6.0, 4), Sum(6.0)], ids=repr)
def test_terms_are_copied_pickled_and_printed(term):
    for twin in (copy.deepcopy(term), pickle.loads(pickle.dumps(term))):
        assert repr(twin) == repr(term)
        assert twin.value == term.value


@pytest.mark.parametrize("where", [[True, False, True], True])
def test_a_mask_that_is_no_array_is_refused(where):
    with pytest.raises(LossTypeError, match="where must be an array in the shape of the values, got"):
        Mean.of(np.ones(3), where=where)


def test_errors_on_purpose_share_a_base():
    assert issubclass(LossTypeError, WholeBatchError)
    assert issubclass(LossTypeError, TypeError)
    assert issubclass(LossTypeError, ValueError)
