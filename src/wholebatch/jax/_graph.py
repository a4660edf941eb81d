"""Flax NNX modules as what a pure function takes: a state to differentiate and a state to hand on.

All modules of a call are split together, so what they share stays shared, and merged again inside each piece: a module
that crosses into a traced loop as it is would belong to another trace.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from .._errors import LossError, OptionError
from ._statistics import BatchNorms
from ._tree import Tree

State = nnx.State[Any, Any]

Where = int | str
"""An argument's position, or its name."""


class Graph:
    """The modules among one call's arguments.

    Args:
        args: the positional arguments.
        kwargs: the others.
        filters: which variables to differentiate, by the position of their argument.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], filters: dict[int, Any]) -> None:
        self._nodes = {str(where): arg for where, arg in (*enumerate(args), *kwargs.items()) if _holds_nodes(arg)}
        self.positions = [i for i in range(len(args)) if str(i) in self._nodes]
        self._diff_at = [i for i in filters if i in self.positions]
        self.batch_norms = BatchNorms(self._nodes)
        chosen = [_under(str(i), filters[i]) for i in self._diff_at]
        self._filters = (*chosen, self.batch_norms.holds, ...)
        self._graphdef, *states, self.statistics, self.state = _split(self._nodes, self._filters)
        self._differentiated = dict(zip(self._diff_at, states, strict=True))

    def as_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with states to differentiate in place of modules, and nothing in place of the others."""
        replaced = [self._to_differentiate(i) if i in self.positions else arg for i, arg in enumerate(args)]
        return tuple(replaced), {name: None if name in self._nodes else arg for name, arg in kwargs.items()}

    def call(
        self, fun: Callable[..., Any], statistics: State, state: State, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, State, State]:
        """`fun` with modules made of these states; what it returned, and the statistics and the state it left."""
        states = [nnx.State({str(i): args[i]}) for i in self._diff_at]
        statistics = jax.tree.map(lambda leaf: leaf, statistics)  # as variables of this trace
        nodes = nnx.merge(self._graphdef, *states, statistics, state)
        args = tuple(nodes[str(i)] if i in self.positions else arg for i, arg in enumerate(args))
        returned = fun(*args, **{name: nodes.get(name, arg) for name, arg in kwargs.items()})
        _, *_, statistics, left = _split(nodes, self._filters)
        _refuse_other_variables(self.state, left)
        return returned, statistics, left

    def statistics_seen(self, before: tuple[State, State], after: tuple[State, State]) -> list[str]:
        """The batch statistics that a call has written, by path; whoever writes them is in training mode.

        Args:
            before: statistics and state before the call.
            after: those it left.
        """
        left = dict(nnx.to_flat_state(nnx.merge_state(*after)))
        return [
            ".".join(map(str, path[1:]))
            for path, variable in nnx.to_flat_state(nnx.merge_state(*before))
            if isinstance(variable, nnx.BatchStat) and left[path].get_raw_value() is not variable.get_raw_value()
        ]

    def written(self, before: State, after: State) -> State:
        """The running statistics after a call, or none where it has not written any."""
        kept = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        return nnx.State({}) if all(one is other for one, other in kept) else after

    def update(self, state: State, statistics: State) -> None:
        """Write both into the user's modules."""
        nnx.update(self._nodes, state, statistics)

    def _to_differentiate(self, i: int) -> Tree:
        if i not in self._differentiated:
            return None
        state = self._differentiated[i]
        if not state:
            raise OptionError(
                f"argument {i} holds no variable that its filter takes: there is nothing to differentiate"
            )
        return state[str(i)]


def _split(nodes: dict[str, Any], filters: tuple[Any, ...]) -> tuple[Any, ...]:
    parts: tuple[Any, ...] = nnx.split(nodes, *filters)
    return parts


def _holds_nodes(arg: Any) -> bool:
    return any(map(_is_node, jax.tree.leaves(arg, is_leaf=_is_node)))


def _is_node(value: Any) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _under(where: str, filter: Any) -> Callable[[tuple[Any, ...], Any], bool]:
    predicate = nnx.filterlib.to_predicate(filter)
    return lambda path, variable: path[0] == where and predicate(path[1:], variable)


def _refuse_other_variables(before: State, after: State) -> None:
    """What one piece leaves is what the next one takes."""
    other = {path for path, _ in nnx.to_flat_state(before)} ^ {path for path, _ in nnx.to_flat_state(after)}
    if other:
        named = ", ".join(sorted(".".join(map(str, path[1:])) for path in other))
        raise LossError(
            f"the loss function adds or removes variables of the model ({named}): pop them inside it and return them "
            "as aux, or make them before"
        )
