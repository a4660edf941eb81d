"""What the ratio of two gradients tells, on numbers that no loop has made."""

import numpy as np
import pytest

from wholebatch import BatchError
from wholebatch._comparison import Hints, compare

DRAW = np.random.default_rng(0)
RIGHT = {"weight": DRAW.normal(size=6), "bias": DRAW.normal(size=2), "unused": np.zeros(3)}


def compared(change, **hints):
    given = change(RIGHT) if callable(change) else {name: change * b for name, b in RIGHT.items()}
    return compare({name: (given[name], b) for name, b in RIGHT.items()}, 1e-12, Hints(**hints))


def test_equal_gradients_are_equal():
    found = compared(1 + 1e-15)
    assert found.equal
    assert found.ratio == pytest.approx(1)
    assert str(found) == "equal: they agree within rounding"


@pytest.mark.parametrize(
    ("ratio", "hints", "reason"),
    [
        (
            0.5,
            {"num_micro_batches": 2, "accumulation_steps": 4},
            "a short window of 2 is divided by the 4 of a full one",
        ),
        (1 / 8, {"num_micro_batches": 2, "accumulation_steps": 8}, "a short window of 2 is divided by 2 and by 8"),
        (0.25, {"num_micro_batches": 4}, "divided twice by the number of micro-batches, 4"),
        (4, {"num_micro_batches": 4}, "a sum over 4 micro-batches where their mean was meant"),
        (0.5, {"num_micro_batches": 4, "world_size": 2}, "divided twice by the number of processes, 2"),
        (2, {"world_size": 2}, "a sum over 2 processes where their mean was meant"),
        (1 / 8, {"num_micro_batches": 4, "world_size": 2}, "divided once more by 4 micro-batches and 2 processes"),
        (8, {"num_micro_batches": 4, "world_size": 2}, "a sum over 4 micro-batches and 2 processes"),
        (32, {"rows": 32}, "a sum over 32 rows where their mean was meant"),
        (3, {}, "a sum over 3 pieces, processes or rows"),
        (1 / 3, {}, "divided by 3 once too often"),
        (3 / 4, {}, "3/4: like a short window of 3 pieces that is divided by the 4 of a full one"),
        (4 / 3, {}, "4/3: like 4 pieces or rows that are divided by 3"),
        (65536, {}, "a power of two, like a loss scale"),
        (0.123456789, {}, "one factor for all"),
        (-1, {}, "the sign is wrong"),
    ],
)
def test_one_ratio_for_all_names_its_reason(ratio, hints, reason):
    found = compared(ratio, **hints)
    assert not found.equal
    assert found.ratio == pytest.approx(ratio)
    assert found.ratios == {"weight": pytest.approx(ratio), "bias": pytest.approx(ratio), "unused": None}
    assert reason in found.explanation
    assert f"all are {ratio:.5g} times what they should be" in found.explanation


def test_a_ratio_for_each_says_which():
    found = compared(lambda right: {**right, "weight": 2 * right["weight"]})
    assert found.ratio is None
    assert found.ratios["weight"] == pytest.approx(2)
    assert found.ratios["bias"] == pytest.approx(1)
    assert "with a ratio of its own" in found.explanation
    assert "2 times for weight; 1 times for bias" in found.explanation


def test_what_is_not_proportional_is_beyond_a_factor():
    found = compared(lambda right: {**right, "weight": right["weight"][::-1]})
    assert found.ratio is None
    assert found.ratios["weight"] is None
    assert found.explanation.startswith("weight: not proportional to what it should be")
    assert "mean of means" in found.explanation


def test_a_gradient_where_none_should_be_is_told():
    found = compared(lambda right: {**right, "unused": np.ones(3)})
    assert found.explanation.startswith("unused: not proportional")


def test_missing_and_infinite_gradients_are_named():
    assert compared(lambda right: {**right, "bias": np.zeros(2)}).explanation.startswith("bias: no gradient, or zero")
    assert compared(0).explanation.startswith("weight, bias: no gradient, or zero")
    found = compared(lambda right: {**right, "bias": np.array([1, np.nan])})
    assert found.explanation == "bias: holds entries that are not finite"
    assert found.error == float("inf")


def test_it_fits_a_terminal():
    said = str(compared(0.5, num_micro_batches=2, accumulation_steps=4))
    assert max(map(len, said.splitlines())) <= 80
    assert said.startswith("NOT equal: all are 0.5 times")
    assert said.splitlines()[-1].split() == ["unused", "-", "0.0e+00"]


def test_nothing_to_compare_is_an_error():
    with pytest.raises(BatchError, match="there are no gradients to compare"):
        compare({}, 1e-12, Hints())
    with pytest.raises(BatchError, match="zero everywhere, or not finite"):
        compare({"a": (np.ones(2), np.zeros(2))}, 1e-12, Hints())
