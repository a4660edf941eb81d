"""Check: is a split exact on this function, and if not, why? Compute both gradients and compare them.

In float64 where the function allows it, in its own precision where it then fails.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax import numpy as jnp

from .._causes import Cause
from .._generators import PythonGenerators, kept_generators
from .._layouts import other_layouts
from .._plan import check_sizes
from .._report import Report, report_of_other_layout, report_on, tolerance
from .._rules import rows_matter
from .._sample import cuts_to_try, rows_to_use
from ._arguments import Argnums, Arguments
from ._modules import Modules, is_module
from ._probes import JaxProbe
from ._sample import as_it_is, chosen_rows, widest
from ._tree import Tree
from ._trial import NOTHING_OFF, Gradients, Trial, by_name, errors

Axes = list[int | None]
"""The axis of each array's rows; None for one that goes whole to each piece."""


def check(
    fun: Callable[..., Any],
    params: Tree,
    *batch: Any,
    micro_batch_size: int | None = None,
    has_aux: bool = False,
    batch_argnums: Argnums | None = None,
    rng_argnums: Argnums = (),
) -> Report:
    """Compare the gradient of a batch with that of its pieces, for several ways of cutting it, and say why they differ.

    Args:
        fun: as for `value_and_grad`, called as `fun(params, *batch)`.
        params: what to differentiate: a tree of arrays, or an NNX module, which is left as it is.
        batch: the other arguments; a few rows are used, spread over the batch.
        micro_batch_size: a size to try besides the usual ones.
        has_aux: as for `value_and_grad`.
        batch_argnums: as for `value_and_grad`, where `params` is argument 0.
        rng_argnums: as for `value_and_grad`.

    >>> from jax import numpy as jnp
    >>> x, y = jnp.ones((50, 3)), jnp.zeros(50)
    >>> check(lambda w, x, y: jnp.mean((x @ w - y) ** 2), jnp.ones(3), x, y).exact
    True
    """
    check_sizes(micro_batch_size, None)
    job = _Check(fun, params, batch, micro_batch_size, has_aux, batch_argnums, rng_argnums)
    try:
        with jax.enable_x64(True):
            return job.report(widest)
    except Exception:  # the function may insist on its own precision; if that is not it, it fails again
        try:
            return job.report(as_it_is)
        except Exception as error:
            report = job.report_of_failure(error)
            if report is None:
                raise
            return report
    finally:
        job.generators.restore()


class _Check:
    """One call of `check`."""

    def __init__(
        self,
        fun: Callable[..., Any],
        params: Tree,
        batch: tuple[Any, ...],
        size: int | None,
        has_aux: bool,
        batch_argnums: Argnums | None,
        rng_argnums: Argnums,
    ) -> None:
        self.generators = PythonGenerators(kept_generators(fun, params))
        self._user_fun, self._size, self._has_aux = fun, size, has_aux
        self._batch_argnums, self._rng_argnums = batch_argnums, rng_argnums
        self._modules = Modules(params) if is_module(params) else None
        self._fun = fun if self._modules is None else self._modules.function(fun)
        self._params = params if self._modules is None else self._modules.params
        self._arguments = Arguments(
            self._fun,
            (self._params, *batch),
            {},
            argnums=0,
            batch_argnums=batch_argnums,
            batch_argnames=(),
            rng_argnums=rng_argnums,
        )

    def report(self, prepare: Callable[[Any], Any]) -> Report:
        """The verdict on the function as it is."""
        trial = self._make_trial([0] * len(self._arguments.batch), prepare)
        cuts = cuts_to_try(trial.rows, self._size and -(-trial.rows // self._size))
        modules = self._modules
        probe = JaxProbe(
            trial,
            lambda eps: tolerance(eps, max(cuts)),
            lambda off, allowed: self._exact_layout(off, allowed, prepare),
            batch_norms=modules.batch_norms if modules else (),
            state_matters=lambda first, allowed: modules is not None and self._state_matters(trial, first, allowed),
            moves_statistics=lambda: self._moves_statistics(trial),
            has_modes=modules is not None,
        )
        return report_on(probe, cuts)

    def report_of_failure(self, error: Exception) -> Report | None:
        """The verdict where already a few rows fail, if that is because they are no rows."""
        with jax.enable_x64(True):
            what = self._exact_layout(NOTHING_OFF, 1e-6, widest)
        what = what or self._exact_layout(NOTHING_OFF, 1e-6, as_it_is)
        if what is None:
            return None
        rows = rows_to_use(self._arguments.rows, self._size)
        return report_of_other_layout(what, by_name(self._params), rows, error)

    def _make_trial(self, axes: Axes, prepare: Callable[[Any], Any]) -> Trial:
        """Of a few rows, with the rows of each array on that axis."""
        given = self._arguments.batch
        whole: list[Any] = [prepare(leaf) if axis is None else None for leaf, axis in zip(given, axes, strict=True)]
        cut = [jnp.moveaxis(leaf, axis, 0) for leaf, axis in zip(given, axes, strict=True) if axis is not None]
        chosen = chosen_rows(cut, self._size)

        def placed(rows: list[Array]) -> list[Array]:
            waiting = iter(rows)
            return [
                kept if axis is None else jnp.moveaxis(next(waiting), 0, axis)
                for kept, axis in zip(whole, axes, strict=True)
            ]

        def fun(params: Tree, rows: list[Array], *keys: Tree) -> Any:
            return self._arguments.call(self._fun, (params,), placed(rows), keys)

        params = jax.tree.map(prepare, self._params)
        part = [prepare(leaf[chosen]) for leaf in cut]
        switch: Callable[[frozenset[Cause]], None] = lambda off: None  # noqa: E731
        door = None
        if self._modules is not None:
            modules = self._modules
            modules.widen = prepare

            def switch(off: frozenset[Cause]) -> None:
                modules.in_eval_mode = "batch-statistics" in off

            if all(axis == 0 for axis in axes):

                def door(pieces: int) -> Tree:
                    return jax.jit(lambda *given: self._through_the_door(pieces, *given))(params, placed(part))

        return Trial(
            fun,
            params,
            part,
            self._arguments.keys,
            has_aux=self._has_aux,
            generators=self.generators,
            switch=switch,
            door=door,
        )

    def _through_the_door(self, pieces: int, params: Tree, leaves: list[Array]) -> Tree:
        """As a user of NNX would, on modules of its own: what a piece changes in them the next one sees."""
        from . import nnx

        assert self._modules is not None
        cut = nnx.value_and_grad(
            self._user_fun,
            has_aux=self._has_aux,
            num_micro_batches=pieces,
            batch_norm="micro",
            batch_argnums=self._batch_argnums,
            rng_argnums=self._rng_argnums,
        )
        args = self._arguments.call(lambda *args: args, (params,), leaves, self._arguments.keys)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is split by pieces is what is being looked at
            _, gradients = cut(self._modules.merged(params), *args[1:])
        return gradients

    def _state_matters(self, trial: Trial, first: Gradients, allowed: float) -> bool:
        """Whether a call leaves a state in which the next one differs, but for random counts."""
        left, _ = self._after_a_call(trial)
        assert self._modules is not None
        before, self._modules.rest = self._modules.rest, left
        try:
            return not max(errors(first, trial.whole()).values(), default=0.0) <= allowed
        finally:
            self._modules.rest = before

    def _moves_statistics(self, trial: Trial) -> bool:
        if self._modules is not None:
            return self._after_a_call(trial)[1]
        if not self._has_aux:
            return False
        reported = jax.eval_shape(lambda *args: trial.with_aux(*args)[1], *trial.arguments)
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(reported)]
        return any("batch_stats" in path for path in paths)  # Linen's name for what it hands out in training mode

    def _after_a_call(self, trial: Trial) -> tuple[Tree, bool]:
        modules, (params, rows, *keys) = self._modules, trial.arguments
        assert modules is not None
        modules.in_eval_mode = False
        args = self._arguments.call(lambda *args: args, (params,), rows, tuple(keys))
        return modules.after(lambda module: self._user_fun(module, *args[1:]), params)

    def _exact_layout(self, off: frozenset[Cause], allowed: float, prepare: Callable[[Any], Any]) -> str | None:
        """The first other layout of the batch in which a split is exact, in words."""
        paths = self._arguments.paths()
        shapes = {path: leaf.shape for path, leaf in zip(paths, self._arguments.batch, strict=True)}
        for what, layout in other_layouts(shapes):
            try:
                trial = self._make_trial([layout[path] for path in paths], prepare)
                exact = trial.rows > 1 and trial.error_without(off, [2, min(3, trial.rows)]) <= allowed
                if exact and any(rows_matter(trial.rows, trial.view(term, off)) for term in trial.terms()):
                    return what
            except Exception:  # it cannot be meant like this
                continue
        return None
