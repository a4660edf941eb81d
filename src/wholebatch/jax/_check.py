"""Check: is a split exact on this function? Compute both gradients and compare them.

    error = max |split - whole| / max |whole|

over every entry of every parameter; in float64 where the function allows it.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator
from functools import reduce
from operator import add
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from .._errors import BatchError
from .._mean import Mean, Sum
from .._plan import check_sizes
from .._report import Report, cuts_to_try, rows_to_use
from .._terms import named_terms
from ._arguments import Argnums, Arguments
from ._tree import Tree
from ._value_and_grad import value_and_grad

Gradients = dict[str, np.ndarray]


def check(
    fun: Callable[..., Any],
    params: Tree,
    *batch: Any,
    micro_batch_size: int | None = None,
    has_aux: bool = False,
    batch_argnums: Argnums | None = None,
    rng_argnums: Argnums = (),
) -> Report:
    """Compare the gradient of a batch with that of its pieces, for several ways of cutting it.

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
    fun, params = _functional(fun, params)
    arguments = Arguments(
        fun,
        (params, *batch),
        {},
        argnums=0,
        batch_argnums=batch_argnums,
        batch_argnames=(),
        rng_argnums=rng_argnums,
    )
    rows = rows_to_use(arguments.rows, micro_batch_size)
    chosen = np.linspace(0, arguments.rows - 1, rows).round().astype(int)
    args = arguments.call(lambda *args: args, (params,), [leaf[chosen] for leaf in arguments.batch], arguments.keys)
    cuts = cuts_to_try(rows, micro_batch_size and -(-rows // micro_batch_size))
    split = functools.partial(
        value_and_grad, fun, has_aux=has_aux, batch_argnums=batch_argnums, rng_argnums=rng_argnums
    )
    try:
        with jax.enable_x64(True):
            return _compare(fun, has_aux, split, rows, cuts, _widened(args))
    except Exception:  # the function may insist on its own precision; if that is not it, it fails again
        return _compare(fun, has_aux, split, rows, cuts, args)


def _compare(
    fun: Callable[..., Any],
    has_aux: bool,
    split: Callable[..., Callable[..., Any]],
    rows: int,
    cuts: list[int],
    args: tuple[Any, ...],
) -> Report:
    def objective(*args: Any) -> Any:
        """The whole batch's loss, plainly, on purpose: nothing of what is being judged."""
        returned = fun(*args)
        terms = named_terms(returned[0] if has_aux else returned).values()
        return reduce(add, [term.value if isinstance(term, Mean | Sum) else term for term in terms])

    whole = _by_name(jax.jit(jax.grad(objective))(*args))
    if not any(gradient.any() for gradient in whole.values()):
        raise BatchError(f"the gradient of these {rows} rows is zero everywhere: there is nothing to compare")
    by_cut: dict[int, dict[str, float]] = {}
    failure = None
    for pieces in cuts:
        try:
            _, gradients = jax.jit(split(num_micro_batches=pieces))(*args)
            by_cut[pieces] = _errors(whole, _by_name(gradients))
        except Exception as caught:  # the whole batch went well, so it is the split that is not borne
            by_cut[pieces] = dict.fromkeys(whole, math.inf)
            failure = f"{pieces} pieces: {type(caught).__name__}: {caught}"
    least = _least_precise(jax.make_jaxpr(jax.grad(objective))(*args).jaxpr)
    return Report.of(by_cut, dtype=str(least), eps=_eps(least), rows=rows, failure=failure)


def _functional(fun: Callable[..., Any], params: Tree) -> tuple[Callable[..., Any], Tree]:
    """A function of arrays; a module, which only who uses NNX can have, is merged anew for every call."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(params, nnx.Pytree):
        return fun, params
    graphdef, state, rest = nnx.split(params, nnx.Param, ...)

    def of_state(state: Tree, *batch: Any) -> Any:
        return fun(nnx.merge(graphdef, state, jax.tree.map(_widest, rest)), *batch)

    return of_state, state


def _widened(tree: Tree) -> Tree:
    return jax.tree.map(_widest, tree)


def _widest(leaf: Any) -> Any:
    """In float64, if that is switched on."""
    if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    return jnp.asarray(leaf, jnp.result_type(complex if jnp.iscomplexobj(leaf) else float))


def _by_name(gradients: Tree) -> Gradients:
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return {jax.tree_util.keystr(path) or "params": np.asarray(leaf) for path, leaf in leaves}


def _errors(whole: Gradients, split: Gradients) -> dict[str, float]:
    """Each parameter's largest difference, over the largest entry of the model."""
    scale = max(_largest(gradient) for gradient in whole.values())
    scale = scale if 0 < scale < math.inf else 1.0
    return {name: _largest(split[name] - whole[name]) / scale for name in whole}


def _largest(entries: np.ndarray) -> float:
    """The largest magnitude; infinite where an entry is not a number, so that comparisons do not lose it."""
    magnitudes = np.abs(entries).astype(np.float64)
    return float(np.nan_to_num(magnitudes, nan=math.inf, posinf=math.inf).max(initial=0.0))


def _least_precise(jaxpr: Jaxpr) -> Any:
    """The least precise floating point type that leads to a program's result."""
    jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    dtypes = {variable.aval.dtype for equation in _equations(jaxpr) for variable in equation.outvars}
    return max((d for d in dtypes if jnp.issubdtype(d, jnp.floating)), key=_eps)


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
