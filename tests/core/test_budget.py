"""Memory sizes, the search for the largest micro-batch, and what a plan says."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholebatch import BudgetError, OptionError, OptionTypeError
from wholebatch._budget import Plan, bytes_of, fitted, in_units, largest_that_fits


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("800MB", 800_000_000),
        (" 1.5 gib ", 3 * 2**29),
        ("2kb", 2000),
        ("4096", 4096),
        ("7B", 7),
        (4096, 4096),
        (np.int64(4096), 4096),
    ],
)
def test_sizes_are_understood(given, size):
    assert bytes_of(given) == size


@pytest.mark.parametrize("text", ["", "GiB", "24G", "24 GiB of RAM", "-3GiB", "1e9", "24GIBS"])
def test_other_texts_are_refused_with_the_units_that_are_known(text):
    with pytest.raises(OptionError, match='memory must be a number and a unit, such as "24GiB" or "800MB", got') as e:
        bytes_of(text)
    assert "MiB" in str(e.value)


@pytest.mark.parametrize("given", [2.5, None, True, [4]])
def test_other_types_are_refused(given):
    with pytest.raises(OptionTypeError, match="memory must be a number of bytes or a size"):
        bytes_of(given)


@pytest.mark.parametrize("given", [0, -5, "0GiB"])
def test_no_memory_is_refused(given):
    with pytest.raises(OptionError, match="memory must be at least one byte"):
        bytes_of(given)


def test_sizes_are_said_in_units():
    assert [in_units(size) for size in (3, 2**20, 25 * 2**30)] == ["3 B", "1.00 MiB", "25.0 GiB"]


def convex(flat, slope, later_slope, kink, whole):
    """A peak that is flat, then grows, then grows faster; the whole batch in one piece is a case of its own."""
    return lambda rows: (
        lambda size: (
            whole if size == rows else max(flat, 100 + slope * size, 100 + slope * kink + later_slope * (size - kink))
        )
    )


@given(
    rows=st.integers(1, 300),
    flat=st.integers(0, 2000),
    slope=st.integers(0, 50),
    later=st.integers(0, 50),
    kink=st.integers(1, 200),
    whole=st.integers(0, 9000),
    memory=st.integers(1, 9000),
)
def test_the_largest_size_that_fits_is_found(rows, flat, slope, later, kink, whole, memory):
    peak = convex(flat, slope, max(slope, later), kink, whole)(rows)
    fitting = [size for size in range(1, rows + 1) if peak(size) <= memory]
    fits_from_one_row_on = rows in fitting or 1 in fitting
    if not fits_from_one_row_on:
        with pytest.raises(BudgetError):
            largest_that_fits(peak, range(1, rows + 1), memory)
    else:
        assert largest_that_fits(peak, range(1, rows + 1), memory) == max(fitting)


def test_few_sizes_are_asked_for_where_peaks_are_lines():
    asked = []

    def peak(size):
        asked.append(size)
        return 10_000 + 7 * size

    assert largest_that_fits(peak, range(1, 100_001), 10_000 + 7 * 31_415) == 31_415
    assert len(set(asked)) <= 6


def test_tries_may_be_few_and_sizes_far_apart():
    asked = []

    def peak(size):
        asked.append(size)
        return size**2  # on no line

    assert largest_that_fits(peak, [1, 10, 20, 40, 80, 100], 1700) == 40
    asked.clear()
    found = largest_that_fits(peak, range(1, 1001), 500_000, tries=2)
    assert found < 707
    assert len(set(asked)) == 4
    with pytest.raises(BudgetError, match="even with 8 rows, one for each device, at a time"):
        largest_that_fits(peak, [8, 16], 50)


def test_a_budget_too_small_for_one_row_names_what_is_needed():
    with pytest.raises(BudgetError, match=r"memory=1.00 KiB is too little: a step needs 2.00 KiB \(2048 bytes\)") as e:
        largest_that_fits(lambda size: 1024 + 1024 * size, range(1, 9), 1024)
    assert e.value.needed == 2048


def a_plan(memory=1500):
    peak = lambda size: 1000 + 100 * size  # noqa: E731
    return fitted(
        largest_that_fits(peak, range(1, 11), memory),
        lambda size: 1000 + 100 * size,
        lambda size, peak: {
            "parameters": 300,
            "gradients": 300,
            "optimizer": 200,
            "activations_per_row": 100,
            "fixed": peak - 800 - 100 * size,
        },
        rows=10,
        memory=memory,
        sizes=lambda chosen: {size: 1000 + 100 * size for size in (1, 4, 9, 10, chosen)},
        remarks=("no optimizer was given",),
    )


def test_a_plan_says_what_fits():
    plan = a_plan()
    assert (plan.micro_batch_size, plan.num_micro_batches, plan.predicted_peak) == (5, 2, 1500)
    assert plan.peak(plan.micro_batch_size) == plan.predicted_peak <= plan.memory < plan.peak(6)
    assert sum(plan.parts.values()) + 4 * plan.parts["activations_per_row"] == plan.predicted_peak


def test_between_known_sizes_peaks_lie_on_a_line_and_beyond_the_batch_there_is_one_piece():
    plan = a_plan()
    assert [plan.peak(size) for size in (1, 2, 7, 9, 10, 11, 500)] == [1100, 1200, 1700, 1900, 2000, 2000, 2000]


def test_a_batch_of_one_row_has_one_peak():
    plan = Plan(1, 1, 50, 60, 1, {}, {1: 50})
    assert plan.peak(1) == plan.peak(7) == 50


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_sizes_that_cannot_be_meant_are_refused(size):
    with pytest.raises(OptionError, match="micro_batch_size must be"):
        a_plan().peak(size)


def test_a_plan_is_printed_as_a_small_table():
    text = str(a_plan())
    assert text.startswith("micro_batch_size=5: 10 rows in 2 pieces, 1.46 KiB of 1.46 KiB")
    assert "5 rows of 100 B" in text
    assert "does not fit" in text
    assert "no optimizer was given" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "10 rows in one piece" in str(a_plan(memory=5000))


def test_a_plan_is_data_for_programs():
    data = json.loads(json.dumps(a_plan().as_json()))
    assert data["micro_batch_size"] == 5
    assert data["curve"]["10"] == 2000


def test_a_plan_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    a_plan().plot(str(tmp_path / "plan.svg"))
    assert "</svg>" in (tmp_path / "plan.svg").read_text()
    with pytest.raises(OptionError, match="no picture can be written to"):
        a_plan().plot(str(tmp_path / "plan.nothing"))


def test_without_its_extra_a_picture_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match="wholebatch\\[plot\\]"):
        a_plan().plot("plan.png")
