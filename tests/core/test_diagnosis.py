"""The rules and the diagnosis, on numbers that no framework has made."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from wholebatch._causes import MEANINGS
from wholebatch._diagnosis import Finding, diagnose
from wholebatch._layouts import other_layouts
from wholebatch._report import Report
from wholebatch._rules import Observation, order_matters, rows_are_separate, rule_broken, stride
from wholebatch._sample import rows_to_take
from wholebatch._terms import Per

ROWS = 7
DRAW = np.random.default_rng(0)
EACH = DRAW.normal(size=(ROWS, 5))
WEIGHT = np.array([3.0, 1, 2, 0, 1, 2, 5])
PENALTY = DRAW.normal(size=5)
EPS = 2.2e-16


def weighted(rows):
    with np.errstate(invalid="ignore"):
        return WEIGHT[rows] @ EACH[rows] / WEIGHT[rows].sum()


def weighted_otherwise(rows):
    other = np.array([1.0, 4, 1, 2, 5, 2, 3])
    return other[rows] @ EACH[rows, ::-1] / other[rows].sum()


def mean(rows):
    return EACH[rows].mean(0)


def total(rows):
    return EACH[rows].sum(0)


def coupled(rows):
    return np.abs(EACH[rows] - EACH[rows].mean(0)).mean(0) + EACH[rows].max(0)


# what the loss says, how it is read, and what is to be found
RULES = {
    "a mean": (Per.ROWS, lambda r: Observation(mean(r)), None),
    "a mean and a penalty": (Per.ROWS, lambda r: Observation(mean(r) + PENALTY), None),
    "a weighted mean": (Per.ROWS, lambda r: Observation(weighted(r)), "mean-of-means"),
    "a weighted mean and a penalty": (Per.ROWS, lambda r: Observation(weighted(r) + PENALTY), "mean-of-means"),
    "two weighted means": (Per.ROWS, lambda r: Observation(weighted(r) + 0.1 * weighted_otherwise(r)), "mean-of-means"),
    "a weighted mean and a mean": (Per.ROWS, lambda r: Observation(weighted(r) + mean(r)[::-1]), "mean-of-means"),
    "two weighted means and a penalty": (
        Per.ROWS,
        lambda r: Observation(weighted(r) + weighted_otherwise(r) + PENALTY),
        "mean-of-means",
    ),
    "a product of weighted means": (
        Per.ROWS,
        lambda r: Observation(weighted(r) * weighted_otherwise(r)),
        "coupled-rows",
    ),
    "the square of a weighted mean": (Per.ROWS, lambda r: Observation(weighted(r) ** 2 + mean(r)), "coupled-rows"),
    "a bent mean and a weighted one": (Per.ROWS, lambda r: Observation(np.tanh(mean(r)) + weighted(r)), "coupled-rows"),
    "a sum": (Per.ROWS, lambda r: Observation(total(r) / 64), "sum-as-mean"),
    "a sum and a penalty": (Per.ROWS, lambda r: Observation(total(r) + PENALTY), "sum-as-mean"),
    "a sum and a mean": (Per.ROWS, lambda r: Observation(total(r) + mean(r)[::-1]), "sum-as-mean"),
    "rows that see each other": (Per.ROWS, lambda r: Observation(coupled(r)), "coupled-rows"),
    "a ratio": (Per.OWN_COUNT, lambda r: Observation(WEIGHT[r] @ EACH[r], WEIGHT[r].sum()), None),
    "a mean over the rows": (Per.OWN_COUNT, lambda r: Observation(mean(r), len(r)), "mean-as-total"),
    "a mean over one": (Per.OWN_COUNT, lambda r: Observation(mean(r), 1), "mean-of-means"),
    "a weighted mean times rows": (
        Per.OWN_COUNT,
        lambda r: Observation(weighted(r) * len(r), len(r)),
        "mean-of-means",
    ),
    "a sum over a fixed count": (Per.OWN_COUNT, lambda r: Observation(total(r), 64), "sum-as-mean"),
    "a penalty in a total": (Per.OWN_COUNT, lambda r: Observation(total(r) + PENALTY, len(r)), "mean-as-total"),
    "a coupled total": (Per.OWN_COUNT, lambda r: Observation(coupled(r), len(r)), "coupled-rows"),
    "a Sum": (Per.NOTHING, lambda r: Observation(total(r)), None),
    "a mean as a Sum": (Per.NOTHING, lambda r: Observation(mean(r)), "mean-as-total"),
    "a coupled Sum": (Per.NOTHING, lambda r: Observation(coupled(r)), "coupled-rows"),
    "what fails for few rows": (Per.ROWS, lambda r: None if len(r) < 3 else Observation(mean(r)), "coupled-rows"),
}


@pytest.mark.parametrize("rows", [3, 4, ROWS])
@pytest.mark.parametrize(("per", "loss", "cause"), RULES.values(), ids=RULES)
def test_the_rule_that_is_broken_is_found(per, loss, cause, rows):
    found = rule_broken(per, rows, lambda chosen: loss(list(chosen)), EPS)
    assert found == cause


def test_two_rows_tell_a_sum_from_a_weighted_mean():
    assert rule_broken(Per.ROWS, 2, lambda rows: Observation(total(list(rows))), EPS) == "sum-as-mean"
    assert rule_broken(Per.ROWS, 2, lambda rows: Observation(weighted(list(rows))), EPS) == "mean-of-means"
    assert rule_broken(Per.ROWS, 2, lambda rows: Observation(coupled(list(rows))), EPS) == "coupled-rows"
    assert rule_broken(Per.ROWS, 1, lambda rows: Observation(total(list(rows))), EPS) is None


def test_two_means_are_told_apart_by_noisy_numbers_too():
    noise = np.random.default_rng(1)
    observe = lambda rows: Observation(  # noqa: E731
        (weighted(list(rows)) + weighted_otherwise(list(rows))) * (1 + 1e-7 * noise.normal(size=5))
    )
    assert rule_broken(Per.ROWS, ROWS, observe, 1.2e-7) == "mean-of-means"


def test_rows_that_alone_hold_the_same_of_both_do_not_tell_two_means_apart():
    """All but the last row hold as many tokens; their pairs look like one mean."""
    held = np.array([4.0, 4, 4, 4, 4, 4, 1])

    def observe(rows):
        rows = list(rows)
        return Observation(held[rows] @ EACH[rows] / held[rows].sum() + mean(rows)[::-1])

    assert rule_broken(Per.ROWS, ROWS, observe, EPS) == "mean-of-means"


@pytest.mark.parametrize("several", [2, 3])
def test_what_fails_where_rows_are_taken_twice_is_not_explained_by_two_means(several):
    def observe(rows):
        rows = list(rows)
        if len(set(rows)) == several < len(rows):
            return None
        return Observation(weighted(rows) + weighted_otherwise(rows))

    assert rule_broken(Per.ROWS, 3, observe, EPS) == "coupled-rows"


def test_parts_that_happen_to_hold_what_is_their_share_hide_nothing():
    """Of 4 tokens for each row on average, the first parts hold just that, and only others do not."""
    held = np.array([4.0, 4, 4, 4, 4, 5, 3])

    def observe(rows):
        rows = list(rows)
        return Observation(held[rows] @ EACH[rows] / held[rows].sum())

    assert rule_broken(Per.ROWS, ROWS, observe, EPS) == "mean-of-means"


def test_of_many_rows_and_entries_some_are_looked_at():
    looked = []

    def observe(rows):
        looked.append(list(rows))
        return Observation(np.array([float(len(rows))]))

    assert rule_broken(Per.ROWS, 1000, observe, EPS) == "sum-as-mean"
    assert len(looked) < 50
    assert [stride(n) for n in (0, 1, 2**16, 2**16 + 1, 2**20)] == [1, 1, 1, 2, 16]


def test_noise_hides_no_rule():
    noise = np.random.default_rng(1)
    observe = lambda rows: Observation(total(list(rows)) * (1 + 1e-7 * noise.normal(size=5)))  # noqa: E731
    assert rule_broken(Per.ROWS, ROWS, observe, 1.2e-7) == "sum-as-mean"
    observe = lambda rows: Observation(mean(list(rows)) * (1 + 1e-7 * noise.normal(size=5)))  # noqa: E731
    assert rule_broken(Per.ROWS, ROWS, observe, 1.2e-7) is None


def test_a_row_that_alone_has_weight_fits_no_sum():
    """Whatever is zero but for one row fits any rule; the rows that count are looked at first."""
    each = np.zeros((ROWS, 5))
    each[4:6] = EACH[4:6]
    chosen = each.any(1)

    def observe(rows):
        rows = list(rows)
        return Observation(each[rows].sum(0) / max(1, chosen[rows].sum()))

    assert rule_broken(Per.ROWS, ROWS, observe, EPS) == "mean-of-means"


def test_order_and_separateness():
    in_order = lambda rows: Observation(np.arange(len(list(rows))) @ EACH[list(rows)])  # noqa: E731
    assert order_matters(ROWS, in_order) > 1e-3
    assert order_matters(ROWS, lambda rows: Observation(mean(list(rows)))) < 1e-12
    assert order_matters(ROWS, lambda rows: None) == math.inf
    assert rows_are_separate(ROWS, lambda rows: Observation(total(list(rows))), 1e-12)
    assert not rows_are_separate(ROWS, lambda rows: Observation(coupled(list(rows))))
    assert not rows_are_separate(ROWS, lambda rows: None)
    assert rows_are_separate(1, lambda rows: None)


@dataclass
class Fake:
    """A probe whose numbers are given."""

    error: float = 1.0
    suspects: tuple = ()
    certain: frozenset = frozenset()
    without: dict = field(default_factory=dict)
    loss: object = staticmethod(lambda rows: Observation(mean(rows)))
    same: bool = True
    layout: str | None = None
    normalises: bool = False
    by_row: bool = False
    rows: int = ROWS
    eps: float = EPS
    tolerance: float = 1e-12

    def repeats(self):
        return self.same

    def error_without(self, off):
        return self.without[frozenset(off)]

    def draws_by_row(self):
        return self.by_row

    def where(self, cause):
        return f"what makes {cause}"

    def terms(self):
        return {"loss": Per.ROWS}

    def observe(self, term, off, rows):
        return self.loss(list(rows))

    def sees_batch_statistics(self):
        return self.normalises

    def other_layout(self, off):
        return self.layout


R, B, S = "randomness", "batch-statistics", "state"


def test_what_does_not_repeat_is_state_whatever_else():
    assert diagnose(Fake(same=False, suspects=(R,))) == Finding(("state",))


def test_what_is_exact_once_it_is_switched_off_is_the_cause():
    found = diagnose(Fake(suspects=(R,), certain=frozenset([R]), without={frozenset([R]): 0.0}))
    assert found == Finding((R,), "what makes randomness", exact_without_randomness=True)
    assert found.remedy.startswith("what makes randomness: ")


def test_behind_randomness_that_cannot_be_switched_off_nothing_is_seen():
    given = {"suspects": (R,), "certain": frozenset([R]), "without": {frozenset([R]): 0.5}}
    summed = lambda r: Observation(total(r))  # noqa: E731
    assert set(diagnose(Fake(loss=summed, **given)).causes) == {R, "sum-as-mean"}
    assert diagnose(Fake(loss=summed, by_row=True, **given)) == Finding((R,))
    given["without"] = {frozenset([R]): 0.0}
    assert diagnose(Fake(by_row=True, **given)).exact_without_randomness, "which is seen all the same"


def test_what_changes_nothing_is_no_cause():
    probe = Fake(suspects=(B,), without={frozenset([B]): 1.0}, loss=lambda r: Observation(total(r)))
    assert diagnose(probe).causes == ("sum-as-mean",)


@pytest.mark.parametrize(("left", "order"), [(0.1, (B, "sum-as-mean")), (0.9, ("sum-as-mean", B))])
def test_what_explains_most_comes_first(left, order):
    probe = Fake(
        suspects=(B,), certain=frozenset([B]), without={frozenset([B]): left}, loss=lambda r: Observation(total(r))
    )
    assert diagnose(probe).causes == order


def test_a_split_that_fails_is_explained_by_what_lets_it_work():
    probe = Fake(error=math.inf, suspects=(S, B), without={frozenset([S]): math.inf, frozenset([S, B]): 0.0})
    assert diagnose(probe).causes == (B,)


def test_shuffled_rows_tell_the_wrong_axis():
    in_order = lambda rows: Observation(np.cumsum(EACH[rows], 0).mean(0) ** 2)  # noqa: E731
    assert diagnose(Fake(loss=in_order, layout="rows lie on axis 1")) == Finding(("wrong-axis",), "rows lie on axis 1")
    assert diagnose(Fake(loss=in_order)).causes == ("coupled-rows",)
    no_order = lambda rows: Observation(coupled(rows))  # noqa: E731
    assert diagnose(Fake(loss=no_order, layout="not asked")).causes == ("coupled-rows",)
    assert diagnose(Fake(loss=no_order, normalises=True)).causes == (B,)


def test_pieces_that_fail_for_a_reason_of_their_own_have_no_known_cause():
    found = diagnose(Fake(error=math.inf, loss=lambda r: None if len(r) < ROWS else Observation(mean(r))))
    assert found == Finding(())
    assert found.remedy is None


def test_small_errors_in_low_precision_are_rounding_if_any_order_makes_them():
    noise = np.random.default_rng(0)
    rounded = lambda rows: Observation(mean(rows) * (1 + 1e-5 * noise.normal(size=5)))  # noqa: E731
    low = {"eps": 1.2e-7, "tolerance": 1e-6, "error": 2e-5}
    assert diagnose(Fake(loss=rounded, **low)) == Finding(("rounding",))
    assert diagnose(Fake(loss=lambda r: Observation(total(r)), **low)).causes == ("sum-as-mean",)
    assert diagnose(Fake(loss=rounded, suspects=(B,), **low)) == Finding(("rounding",)), "also in training mode"
    by_chance = Fake(loss=rounded, suspects=(R,), certain=frozenset([R]), without={frozenset([R]): 0.0}, **low)
    assert diagnose(by_chance).causes == (R,)


def test_layouts_are_those_that_have_rows():
    assert list(other_layouts({"x": (5,)})) == []
    assert [what for what, _ in other_layouts({"x": (5, 4), "y": (5,)})] == [
        "x is not per row",
        "y is not per row",
        "rows lie on axis 1 of x",
    ]
    layouts = dict(other_layouts({"x": (5, 8, 2), "y": (5, 8), "z": (8,), "w": (5,)}))
    assert layouts["rows lie on axis 1 of x, y"] == {"x": 1, "y": 1, "z": 0, "w": None}
    assert "rows lie on axis 1 of x" in dict(other_layouts({"x": (5, 5), "y": (5, 5)}))


def test_unusual_rows_take_the_place_of_their_neighbours():
    assert rows_to_take(50, 7, [9, 9, 49, 10]) == [0, 9, 10, 24, 33, 41, 49]
    assert rows_to_take(3, 3, [1]) == [0, 1, 2]
    assert rows_to_take(1, 1) == [0]


def report(**changes):
    by_cut = {2: {"a": 0.5, "b": 0.1}, 7: {"a": math.inf, "b": 0.2}}
    given = {"dtype": "float64", "eps": EPS, "rows": 7, "failure": None, **changes}
    return Report.of(by_cut, **given)


@pytest.mark.parametrize("cause", MEANINGS)
def test_a_report_of_any_cause_fits_a_terminal(cause):
    where = ", ".join(f"encoder.layers.{i}.normalization (BatchNorm2d)" for i in range(3))
    said = str(
        report(
            finding=Finding((cause, "state"), where, exact_without_randomness=False),
            failure="2 pieces: " + "long " * 40,
        )
    )
    assert max(map(len, said.splitlines())) <= 80
    assert f"cause   {cause}: " in said
    assert "also    state: " in said
    assert "besides with the same draw for every row the split is not exact" in said


def test_a_report_without_a_cause_says_so():
    assert report().cause is None
    assert "cause   none of those that are known" in str(report())
    assert report().as_json()["error"] is None
    assert report().as_json()["cuts"] == {2: 0.5, 7: None}


def test_every_meaning_is_one_line():
    for meaning in MEANINGS.values():
        assert max(map(len, meaning)) <= 72
