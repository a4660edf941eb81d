"""Random numbers in a program: where they are drawn, and what the program does if every row draws the same."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ._tree import Tree

DRAW = "random_bits"
"""The primitive that all of JAX's random numbers are made of."""


def with_same_draws(fun: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """`fun` in which the n-th draw is the same for every row, whatever the keys and the number of rows.

    Args:
        fun: of arrays.
        seed: other ones draw other numbers.
    """

    def redrawn(*args: Any) -> Tree:
        flat, tree = jax.tree.flatten(args)
        program, shape = jax.make_jaxpr(lambda *flat: fun(*jax.tree.unflatten(tree, flat)), return_shape=True)(*flat)
        draws = iter(range(2**31))
        returned = _evaluate(program.jaxpr, program.consts, flat, lambda like: _draw(like, seed, next(draws)))
        return jax.tree.unflatten(jax.tree.structure(shape), returned)

    return redrawn


def draws(fun: Callable[..., Any], *args: Any) -> bool:
    """Whether a function draws random numbers where `with_same_draws` can reach them."""
    return any(equation.primitive.name == DRAW for equation in _reached(jax.make_jaxpr(fun)(*args).jaxpr))


def _draw(like: Any, seed: int, number: int) -> jax.Array:
    """A constant, as programs that draw take long to compile."""
    most = np.iinfo(like.dtype).max
    row = np.random.default_rng((seed, number)).integers(0, most, like.shape[1:], like.dtype, endpoint=True)
    return jnp.broadcast_to(row, like.shape)


def _evaluate(jaxpr: Jaxpr, consts: list[Any], args: list[Any], draw: Callable[[Any], Any]) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        given = [read(variable) for variable in equation.invars]
        inner = _inlined(equation)
        if equation.primitive.name == DRAW:
            made = [draw(equation.outvars[0].aval)]
        elif inner is not None:
            made = _evaluate(inner.jaxpr, inner.consts, given, draw)
        else:
            parameters = equation.primitive.get_bind_params(equation.params)  # type: ignore[no-untyped-call]
            returned = equation.primitive.bind(*given, **parameters)  # type: ignore[no-untyped-call]
            made = returned if equation.primitive.multiple_results else [returned]
        values.update(zip(equation.outvars, made, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _reached(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        inner = _inlined(equation)
        if inner is not None:
            yield from _reached(inner.jaxpr)


def _inlined(equation: Any) -> ClosedJaxpr | None:
    """The program that a `jit` inside another one stands for."""
    inner = equation.params.get("jaxpr") if equation.primitive.name in ("jit", "pjit") else None
    return inner if isinstance(inner, ClosedJaxpr) else None
