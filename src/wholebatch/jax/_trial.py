"""Trial: a function and a few rows, run again and again from the same start.

    error = max |split - whole| / max |whole|

over every entry of every parameter.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr

from .._causes import Cause
from .._errors import BatchError
from .._generators import PythonGenerators
from .._mean import Mean, Sum
from .._report import largest_error
from .._rules import Observation, Observe, stride
from .._terms import Per, named_terms
from ._loss import read
from ._randomness import with_same_draws
from ._tree import Tree
from ._value_and_grad import value_and_grad

Gradients = dict[str, np.ndarray]
ByCut = dict[int, dict[str, float]]
NOTHING_OFF: frozenset[Cause] = frozenset()
SEEDS = 5
"""How many draws to try for one that leaves a gradient."""


class Trial:
    """Runs a function on the whole of a few rows, on their pieces, and on any choice of them.

    Args:
        fun: of the parameters, a list of arrays with rows, and keys.
        params: what to differentiate.
        rows: the arrays.
        keys: of which each piece gets its own.
        has_aux: whether the function returns a pair.
        generators: Python's and NumPy's, as they were at the start.
        switch: called with what is to be switched off before anything is traced.
        door: the gradient of so many pieces by another door, where there is one.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        params: Tree,
        rows: list[Array],
        keys: tuple[Tree, ...],
        *,
        has_aux: bool,
        generators: PythonGenerators,
        switch: Callable[[frozenset[Cause]], None] = lambda off: None,
        door: Callable[[int], Tree] | None = None,
    ) -> None:
        self._fun, self.params, self._rows, self._keys = fun, params, rows, keys
        self._has_aux, self._switch, self._door = has_aux, switch, door
        self.rows = len(rows[0])
        self._seed = 0
        self._python = generators
        self.restores = True
        """Whether Python's generators start anew for every run; not where runs differ by chance."""
        self.failure: str | None = None
        self._observers: dict[Any, Callable[..., Any]] = {}

    def whole(self, off: frozenset[Cause] = NOTHING_OFF) -> Gradients:
        """The gradient of all rows, plainly, on purpose: nothing of what is being judged."""
        return by_name(jax.jit(jax.grad(self.objective(off)))(*self.arguments))

    def objective(self, off: frozenset[Cause] = NOTHING_OFF) -> Callable[..., Any]:
        """The loss of the whole as one number."""
        loss = self._loss(off)

        def objective(*args: Any) -> Any:
            values = named_terms(loss(*args)).values()
            return reduce(add, [term.value if isinstance(term, Mean | Sum) else term for term in values])

        return objective

    def program(self) -> ClosedJaxpr:
        """That of the whole batch's gradient."""
        return jax.make_jaxpr(jax.grad(self.objective()))(*self.arguments)

    def errors(self, cuts: Sequence[int], off: frozenset[Cause] = NOTHING_OFF, whole: Gradients | None = None) -> ByCut:
        """Each parameter's error in each cut. A split that fails where the whole does not is infinitely off."""
        whole = self.whole(off) if whole is None else whole
        if not any(gradient.any() for gradient in whole.values()):
            raise BatchError(f"the gradient of these {self.rows} rows is zero everywhere: there is nothing to compare")
        by_cut: ByCut = {}
        for pieces in cuts:
            try:
                by_cut[pieces] = errors(whole, by_name(self._split(pieces, off)))
            except Exception as caught:  # the whole batch went well, so it is the split that is not borne
                by_cut[pieces] = dict.fromkeys(whole, math.inf)
                self.failure = self.failure or f"{pieces} pieces: {type(caught).__name__}: {caught}"
        return by_cut

    def error_without(self, off: frozenset[Cause], cuts: Sequence[int]) -> float:
        """The largest error with these effects switched off."""
        for seed in range(SEEDS if "randomness" in off else 1):
            self._seed = seed
            try:
                return largest_error(self.errors(cuts, off))
            except BatchError:
                continue
        return math.inf

    def draws_by_row(self) -> bool:
        """Whether Python or NumPy, whose random numbers cannot be made equal, draws some for each row."""
        drawn = set()
        for rows in (1, 2):
            some = [leaf[:rows] for leaf in self._rows]
            jax.eval_shape(self._loss(frozenset(["randomness"])), self.params, some, *self._keys)
            drawn.add(self._python.now())
        return len(drawn) > 1

    def terms(self) -> dict[str, Per]:
        """The terms of the loss."""
        returned: list[dict[str, Per]] = []
        jax.eval_shape(lambda *args: returned.append(read(self._loss(NOTHING_OFF)(*args)).kinds), *self.arguments)
        return returned[-1]

    def with_aux(self, *args: Any) -> Any:
        """All that the user's function returns."""
        return self._fun(*args)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Those of the whole."""
        return self.params, self._rows, *self._keys

    def observe(self, term: str, off: frozenset[Cause], rows: Sequence[int]) -> Observation | None:
        """One term's gradient for these rows."""
        try:
            gradients, count = self._observer(term, off)(self.params, np.asarray(rows), self._rows, *self._keys)
        except Exception:
            return None
        entries = [leaf.reshape(-1)[:: stride(leaf.size)] for leaf in map(np.asarray, jax.tree.leaves(gradients))]
        parts = [part for flat in entries for part in ((flat.real, flat.imag) if np.iscomplexobj(flat) else (flat,))]
        return Observation(np.concatenate(parts).astype(np.float64), float(count))

    def view(self, term: str, off: frozenset[Cause]) -> Observe:
        """The same as a function of the rows."""
        return lambda rows: self.observe(term, off, rows)

    def _observer(self, term: str, off: frozenset[Cause]) -> Callable[..., Any]:
        key = (term, off, self._seed)
        if key not in self._observers:
            loss = self._loss(off)

            def total(params: Tree, index: Array, rows: list[Array], *keys: Tree) -> tuple[Array, Array]:
                reading = read(loss(params, [leaf[index] for leaf in rows], *keys))
                return reading.values[term], jnp.asarray(reading.counts.get(term, 1.0))

            self._observers[key] = jax.jit(jax.grad(total, has_aux=True))
        return self._observers[key]

    def _split(self, pieces: int, off: frozenset[Cause]) -> Tree:
        if self._door is not None and not off:
            self._switch(off)
            return self._door(pieces)
        cut = value_and_grad(
            self._loss(off),
            batch_argnums=1,
            rng_argnums=tuple(range(2, 2 + len(self._keys))),
            num_micro_batches=pieces,
        )
        return jax.jit(cut)(*self.arguments)[1]

    def _loss(self, off: frozenset[Cause]) -> Callable[..., Any]:
        """The user's function, without what it reports besides."""
        if self.restores or "randomness" in off:
            self._python.restore()

        def loss(*args: Any) -> Any:
            self._switch(off)
            if "randomness" in off:
                self._python.restore()
            returned = self._fun(*args)
            return returned[0] if self._has_aux else returned

        return with_same_draws(loss, self._seed) if "randomness" in off else loss


def by_name(gradients: Tree) -> Gradients:
    """Gradients by the path of their leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return {jax.tree_util.keystr(path) or "params": np.asarray(leaf) for path, leaf in leaves}


def errors(whole: Gradients, split: Gradients) -> dict[str, float]:
    """Each parameter's largest difference, over the largest entry of the model."""
    scale = max(_largest(gradient) for gradient in whole.values())
    scale = scale if 0 < scale < math.inf else 1.0
    return {name: _largest(split[name] - whole[name]) / scale for name in whole}


def _largest(entries: np.ndarray) -> float:
    """The largest magnitude; infinite where an entry is not a number, so that comparisons do not lose it."""
    magnitudes = np.abs(entries).astype(np.float64)
    return float(np.nan_to_num(magnitudes, nan=math.inf, posinf=math.inf).max(initial=0.0))
