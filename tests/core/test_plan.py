"""The balanced cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholebatch import OptionError, OptionTypeError
from wholebatch._plan import balanced, check_sizes, positive_integer


@pytest.mark.parametrize(
    ("rows", "size", "pieces", "expected"),
    [
        (10, 4, None, [4, 3, 3]),
        (10, 5, None, [5, 5]),
        (10, 100, None, [10]),
        (1, 4, None, [1]),
        (10, None, 4, [3, 3, 2, 2]),
        (3, None, 8, [1, 1, 1]),
        (10, None, None, [10]),
    ],
)
def test_pieces_are_balanced(rows, size, pieces, expected):
    assert balanced(rows, micro_batch_size=size, num_micro_batches=pieces) == expected


@given(rows=st.integers(1, 500), size=st.integers(1, 600))
def test_pieces_cover_the_rows_and_none_exceeds_the_size(rows, size):
    sizes = balanced(rows, micro_batch_size=size)
    assert sum(sizes) == rows
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-rows // size), "no more pieces than needed"


@given(rows=st.integers(1, 500), pieces=st.integers(1, 600))
def test_the_number_of_pieces_is_met_where_there_are_rows_for_it(rows, pieces):
    sizes = balanced(rows, num_micro_batches=pieces)
    assert sum(sizes) == rows
    assert len(sizes) == min(pieces, rows)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", ["micro_batch_size", "num_micro_batches"])
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_below_one_are_refused(name, value):
    with pytest.raises(OptionError, match=f"{name} must be at least 1, got {value}"):
        check_sizes(**{"micro_batch_size": None, "num_micro_batches": None, name: value})


@pytest.mark.parametrize("value", [2.0, "8", True, [4]])
def test_sizes_that_are_no_integers_are_refused(value):
    with pytest.raises(OptionTypeError, match="micro_batch_size must be a positive integer, got"):
        check_sizes(value, None)


def test_both_sizes_are_refused():
    with pytest.raises(OptionError, match="both micro_batch_size=4 and num_micro_batches=2 were given"):
        check_sizes(4, 2)


def test_sizes_come_back_as_integers():
    assert check_sizes(np.int64(3), None) == (3, None)
    assert check_sizes(None, 4) == (None, 4)


def test_numpy_integers_are_integers():
    assert positive_integer("size", np.int64(3)) == 3
