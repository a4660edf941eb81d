"""State of NNX modules on several devices: each draws random numbers of its own, and all hand on the same state.

A random stream is a key and a count. Keys are folded with the device's index for as long as the batch takes; counts,
and whatever else depends neither on rows nor on keys, come out alike everywhere and are the state of the whole batch.
What does depend on them (a cache, say) would be another one on each device, so it is refused by name.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from .._errors import LossError
from ._tree import Tree

State = nnx.State[Any, Any]


def with_own_keys(state: State, own_keys: Callable[[Tree], Tree]) -> State:
    """The state with keys of this device's own in its random streams."""
    return _with_keys(state, lambda path, key: own_keys(key))


def with_keys_of(state: State, before: State) -> State:
    """The state with the keys that its random streams had before."""
    keys = dict(nnx.to_flat_state(before))
    return _with_keys(state, lambda path, key: keys[path].get_raw_value())


def refuse_what_differs(step: Callable[[State, Tree], State], state: State, own: Tree) -> None:
    """An error if a variable that `step(state, own)` leaves depends on keys, or on what else is a device's own.

    Args:
        step: from the state before a piece to the one after it.
        state: the one before.
        own: the rows and keys of the piece.
    """
    variables = dict(nnx.to_flat_state(state))
    streams = [path for path, variable in variables.items() if isinstance(variable, nnx.RngKey)]
    others = [path for path in variables if path not in streams]

    def left(others_before: list[Tree], streams_before: list[Tree], own: Tree) -> list[list[Tree]]:
        values = zip((*others, *streams), (*others_before, *streams_before), strict=True)
        before = nnx.from_flat_state({path: variables[path].replace(value) for path, value in values})
        after = dict(nnx.to_flat_state(step(before, own)))
        return [[after[path].get_raw_value() for path in paths] for paths in (others, streams)]

    values = [[variables[path].get_raw_value() for path in paths] for paths in (others, streams)]
    jaxpr = _without_side_effects(jax.make_jaxpr(left)(*values, own).jaxpr)
    by_leaf = [path for path, value in zip(others, values[0], strict=True) for _ in jax.tree.leaves(value)]
    same = len(by_leaf)
    kept = jaxpr.invars[same : same + len(streams)] == jaxpr.outvars[same:]
    named = {path for i, path in enumerate(by_leaf) if any(_inputs_used(jaxpr, i)[same:])}
    if named or not kept:
        paths = ", ".join(sorted(".".join(map(str, path[1:])) for path in named or streams))
        raise LossError(
            f"variables of the model depend on the rows or the random keys that a device has ({paths}), so there is no "
            "state of the whole batch to leave in them: return them as aux, or leave data_axis= out"
        )


def _with_keys(state: State, key: Callable[[tuple[Any, ...], Tree], Tree]) -> State:
    replaced: State = nnx.from_flat_state(
        {
            path: variable.replace(key(path, variable.get_raw_value()))
            if isinstance(variable, nnx.RngKey)
            else variable
            for path, variable in nnx.to_flat_state(state)
        }
    )
    return replaced


def _without_side_effects(jaxpr: Any) -> Any:
    """The program without what returns nothing, such as `jax.debug.print`: no state depends on it."""

    def pure(parameter: Any) -> Any:
        if isinstance(parameter, ClosedJaxpr):
            return ClosedJaxpr(_without_side_effects(parameter.jaxpr), parameter.consts)
        return _without_side_effects(parameter) if isinstance(parameter, Jaxpr) else parameter

    equations = [
        equation.replace(
            params=jax.tree.map(pure, equation.params, is_leaf=lambda p: isinstance(p, Jaxpr | ClosedJaxpr)),
            effects=frozenset(),
        )
        for equation in jaxpr.eqns
        if equation.outvars
    ]
    return jaxpr.replace(eqns=equations, effects=frozenset())


def _inputs_used(jaxpr: Any, output: int) -> list[bool]:
    return dce_jaxpr(jaxpr, [i == output for i in range(len(jaxpr.outvars))])[1]
