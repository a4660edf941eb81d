"""From what was measured to what explains it.

What disturbs every measurement goes first: state, randomness, statistics of the batch. Each is switched off in turn,
and what the error loses by that is its share. What is left is due to the loss itself, read term by term; only where
rows turn out to see each other does it matter whether they are rows at all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ._causes import MEANINGS, Cause
from ._rules import Observation, Observe, order_matters, rows_are_separate, rule_broken
from ._terms import Per, title

NOISE = 8
"""How many times the noise of adding up rows in another order an error may be and still be rounding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Why a split is not exact.

    Args:
        causes: what explains most of the error first.
        where: what the first cause is about, such as the name of a module; empty if that is the loss.
        exact_without_randomness: None where nothing is random, or it cannot be switched off.
    """

    causes: tuple[Cause, ...]
    where: str = ""
    exact_without_randomness: bool | None = None

    @property
    def remedy(self) -> str | None:
        """What to do about the first cause."""
        if not self.causes:
            return None
        advice = MEANINGS[self.causes[0]].remedy
        return f"{self.where}: {advice}" if self.where else advice


class Probe(Protocol):
    """What a front end can find out about a model, a loss and a few rows."""

    rows: int
    dtype: str
    """The least precise type that takes part, by name."""
    eps: float
    """The distance from 1 to the next number, in that type."""
    tolerance: float
    error: float
    """The split's, over all cuts, once it was judged."""
    failure: str | None
    """What a split ran into."""
    certain: frozenset[Cause]
    """Those of the suspects that are known to be there."""

    @property
    def suspects(self) -> Sequence[Cause]:
        """What may disturb other measurements and can be switched off, in this order."""

    def judge(self, cuts: Sequence[int]) -> dict[int, dict[str, float]]:
        """The error of each parameter in each cut."""

    def repeats(self) -> bool:
        """Whether the same run from the same start comes out the same."""

    def error_without(self, off: frozenset[Cause]) -> float:
        """The error of the split with these suspects switched off."""

    def draws_by_row(self) -> bool:
        """Whether a random number of each row's own is left with randomness switched off."""

    def where(self, cause: Cause) -> str:
        """What a suspect is about."""

    def terms(self) -> dict[str, Per]:
        """The terms of the loss."""

    def observe(self, term: str, off: frozenset[Cause], rows: Sequence[int]) -> Observation | None:
        """The term for these rows with these suspects switched off."""

    def sees_batch_statistics(self) -> bool:
        """Whether rows are normalised over the batch by a function that is known to do so."""

    def other_layout(self, off: frozenset[Cause]) -> str | None:
        """The first other layout of the batch in which the split is exact, in words."""


def diagnose(probe: Probe) -> Finding:
    """What explains the error of a split that is not exact."""
    if not probe.repeats():
        return Finding(("state",))
    if _is_noise(probe):
        return Finding(("rounding",))
    shares: dict[Cause, float] = {}
    off: frozenset[Cause] = frozenset()
    error, without_randomness = probe.error, None
    for suspect in probe.suspects:
        off |= {suspect}
        without = probe.error_without(off)
        if suspect in probe.certain or without < error / 2 or without <= probe.tolerance < error:
            shares[suspect] = _difference(error, without)
        if suspect == "randomness":
            without_randomness = without <= probe.tolerance
            if not without_randomness and probe.draws_by_row():
                return Finding((suspect,))  # behind which nothing else can be seen
        error = without
        if error <= probe.tolerance:
            break
    where = ""
    if not error <= probe.tolerance:
        cause, where = _cause_in_the_loss(probe, off)
        if cause is not None:
            shares[cause] = max(error, shares.get(cause, 0.0))
    causes = tuple(sorted(shares, key=lambda cause: -shares[cause]))
    if causes and causes[0] in probe.suspects:
        where = probe.where(causes[0])
    return Finding(causes, where, without_randomness if "randomness" in causes else None)


def _is_noise(probe: Probe) -> bool:
    """Whether an error in low precision is as small as that of adding up the same rows in another order."""
    changes = {"randomness", "state"} & {*probe.suspects}
    if probe.eps < 1e-15 or changes or not probe.error <= min(512 * probe.eps, 0.05):
        return False
    noise = max(order_matters(probe.rows, _view(probe, term, frozenset())) for term in probe.terms())
    return math.isfinite(noise) and probe.error <= NOISE * noise


def _cause_in_the_loss(probe: Probe, off: frozenset[Cause]) -> tuple[Cause | None, str]:
    """What a term that is not what it is read as breaks; one about which more is known than that it cannot be cut."""
    terms = probe.terms()
    views: dict[str, Observe] = {name: _view(probe, name, off) for name in terms}
    broken = {name: rule_broken(per, probe.rows, views[name], probe.eps) for name, per in terms.items()}
    told = [name for name, cause in broken.items() if cause not in (None, "coupled-rows")]
    uncut = [name for name, cause in broken.items() if cause == "coupled-rows"]
    if told:
        return broken[told[0]], title(told[0]) if len(terms) > 1 else ""
    if not uncut:
        return None, ""
    if probe.sees_batch_statistics():
        return "batch-statistics", ""
    if _may_not_be_rows(probe, views[uncut[0]]):
        layout = probe.other_layout(off)
        if layout is not None:
            return "wrong-axis", layout
    coupled = [name for name in uncut if not rows_are_separate(probe.rows, views[name])]
    if not coupled:
        return None, ""  # pieces fail for a reason of their own
    return "coupled-rows", title(coupled[0]) if len(terms) > 1 else ""


def _view(probe: Probe, term: str, off: frozenset[Cause]) -> Observe:
    return lambda rows: probe.observe(term, off, rows)


def _may_not_be_rows(probe: Probe, observe: Observe) -> bool:
    """Rows have no order: if shuffling all arrays alike changes the gradient, they hold something else."""
    return order_matters(probe.rows, observe) > max(1e-9, 256 * probe.eps)


def _difference(before: float, after: float) -> float:
    return 0.0 if math.isinf(after) else before - after
