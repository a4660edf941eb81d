"""What the diagnosis can ask about a trial in JAX."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from .._causes import Cause
from .._report import largest_error
from .._rules import Observation
from .._terms import Per
from ._randomness import draws
from ._trial import NOTHING_OFF, ByCut, Gradients, Trial, errors


class JaxProbe:
    """A trial and what disturbs it.

    Args:
        trial: of the user's function as it is.
        tolerance: how large an error may be, by the precision that takes part.
        other_layout: finds another layout of the batch in which the split is exact.
        batch_norms: the names of layers that normalise by the batch.
        state_matters: asks whether a call leaves a state in which the next one differs.
        moves_statistics: asks whether a call changes statistics of the batch.
        has_modes: whether there is an eval mode.
    """

    def __init__(
        self,
        trial: Trial,
        tolerance: Callable[[float], float],
        other_layout: Callable[[frozenset[Cause], float], str | None],
        *,
        batch_norms: Sequence[str] = (),
        state_matters: Callable[[Gradients, float], bool] = lambda first, tolerance: False,
        moves_statistics: Callable[[], bool] = lambda: False,
        has_modes: bool = False,
    ) -> None:
        self._trial, self._other_layout, self._batch_norms = trial, other_layout, batch_norms
        self._state_matters, self._moves_statistics, self._has_modes = state_matters, moves_statistics, has_modes
        self.rows = trial.rows
        program = trial.program()
        least = _least_precise(program.jaxpr)
        self.dtype, self.eps = str(least), _eps(least)
        self.tolerance = tolerance(self.eps)
        self._first = trial.whole()
        trial.restores = False
        self._differs_later = not _same(program, trial.program()) and self._differs(trial.whole())
        trial.restores = True
        self._repeats = not self._differs_later or not self._differs(trial.whole())
        trial.restores = not (self._differs_later and self._repeats)
        self.certain: frozenset[Cause] = frozenset(["batch-statistics"] if batch_norms else [])

    def judge(self, cuts: Sequence[int]) -> ByCut:
        """The error of each parameter in each cut."""
        self._cuts = cuts
        by_cut = self._trial.errors(cuts, whole=self._first)
        self.error = largest_error(by_cut)
        self.failure = self._trial.failure
        return by_cut

    @cached_property
    def suspects(self) -> list[Cause]:
        """Looked for only where the split is not exact."""
        found: list[Cause] = []
        if self._differs_later or draws(self._trial.objective(), *self._trial.arguments):
            found.append("randomness")
        if self._state_matters(self._first, self.tolerance):
            found.append("state")
        if self._has_modes:
            found.append("batch-statistics")
        return found

    def repeats(self) -> bool:
        return self._repeats

    def error_without(self, off: frozenset[Cause]) -> float:
        return self._trial.error_without(off, self._cuts)

    def draws_by_row(self) -> bool:
        return self._trial.draws_by_row()

    def where(self, cause: Cause) -> str:
        return ", ".join(self._batch_norms[:3]) if cause == "batch-statistics" else ""

    def terms(self) -> dict[str, Per]:
        return self._trial.terms()

    def observe(self, term: str, off: frozenset[Cause], rows: Sequence[int]) -> Observation | None:
        return self._trial.observe(term, off, rows)

    def sees_batch_statistics(self) -> bool:
        return self._moves_statistics()

    def other_layout(self, off: frozenset[Cause] = NOTHING_OFF) -> str | None:
        return self._other_layout(off, self.tolerance)

    def _differs(self, gradients: Gradients) -> bool:
        return not max(errors(self._first, gradients).values(), default=0.0) <= self.tolerance


def _same(one: ClosedJaxpr, other: ClosedJaxpr) -> bool:
    """Whether two programs are the same, down to the constants in them."""
    return str(one.jaxpr) == str(other.jaxpr) and all(
        a is b or np.array_equal(_plain(a), _plain(b)) for a, b in zip(one.consts, other.consts, strict=True)
    )


def _plain(const: Any) -> Any:
    """Keys have contents of their own."""
    dtype = getattr(const, "dtype", None)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return jax.random.key_data(const) if is_key else const


def _least_precise(jaxpr: Jaxpr) -> Any:
    """The least precise floating point type that leads to a program's result."""
    jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    dtypes = {variable.aval.dtype for equation in _equations(jaxpr) for variable in equation.outvars}
    floating = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    return max(floating, key=_eps, default=jnp.dtype(jnp.float64))


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda p: isinstance(p, Jaxpr | ClosedJaxpr)):
            if isinstance(parameter, ClosedJaxpr):
                yield from _equations(parameter.jaxpr)
            elif isinstance(parameter, Jaxpr):
                yield from _equations(parameter)
