"""Rows are packed at the least cost under a strict cap."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wholebatch import BatchError
from wholebatch._packing import _EXTRA, packed, sorted_into

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=7)


def cost(groups, lengths, budget):
    return sum(tokens(group, lengths) + _EXTRA * budget for group in groups)


def tokens(group, lengths):
    return len(group) * max(1, *(lengths[row] for row in group))


def partitions(rows):
    """Every way of putting rows into pieces, in order of length or not."""
    if not rows:
        yield []
        return
    first, *others = rows
    for groups in partitions(others):
        yield [[first], *groups]
        for i, group in enumerate(groups):
            yield [*groups[:i], [first, *group], *groups[i + 1 :]]


@settings(max_examples=60)
@given(lengths=LENGTHS, budget=st.integers(9, 40))
def test_no_partition_under_the_cap_costs_less(lengths, budget):
    groups = packed(lengths, budget)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert all(tokens(group, lengths) <= budget for group in groups)
    allowed = (g for g in partitions(range(len(lengths))) if all(tokens(group, lengths) <= budget for group in g))
    assert cost(groups, lengths, budget) == pytest.approx(min(cost(g, lengths, budget) for g in allowed))


def test_rows_in_the_order_they_came_cost_more():
    lengths = [9, 1] * 4
    assert cost([[0, 1], [2, 3], [4, 5], [6, 7]], lengths, 18) > cost(packed(lengths, 18), lengths, 18)


def test_the_longest_piece_comes_first_and_rows_keep_their_order_within_one():
    assert packed([1, 8, 2, 8], 16) == [[1, 3], [0, 2]]


def test_many_rows_take_few_steps():
    groups = packed([16 + 7 * i % 497 for i in range(2000)], 8192)
    assert sum(map(len, groups)) == 2000


def test_rows_of_no_length_take_room_for_one():
    assert sorted(map(len, packed([0, 0, 0], 2))) == [1, 2]


@given(lengths=LENGTHS, size=st.integers(1, 8))
def test_given_sizes_are_kept(lengths, size):
    sizes = [size] * (len(lengths) // size) + ([len(lengths) % size] if len(lengths) % size else [])
    groups = sorted_into(lengths, sizes)
    assert [len(group) for group in groups] == sizes
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for longer, shorter in pairwise(groups):
        assert min(lengths[row] for row in longer) >= max(lengths[row] for row in shorter)


def test_a_row_over_the_budget_is_named():
    with pytest.raises(BatchError, match="row 1 has length 7, and a piece may hold micro_batch_tokens=6"):
        packed([3, 7, 2], 6)
