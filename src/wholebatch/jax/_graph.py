"""Flax NNX modules as what a pure function takes: a state to differentiate and a state to hand on.

An argument is a tree that may have modules (or variables) among its leaves; where it is differentiated, a state stands
in the place of each. All modules of a call are split together, so what they share stays shared, and merged again inside
each piece: a module that crosses into a traced loop as it is would belong to another trace.
"""

from collections.abc import Callable, Mapping
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
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        holders: dict[Where, _Holder] = {where: _Holder(where, arg) for where, arg in given.items()}
        self._holders = {where: holder for where, holder in holders.items() if holder.nodes}
        self.positions = [where for where in self._holders if isinstance(where, int)]
        self._diff_at = [i for i in filters if i in self._holders]
        self._nodes = {name: node for holder in self._holders.values() for name, node in holder.nodes.items()}
        self.batch_norms = BatchNorms(self._nodes)
        chosen = [_under(self._holders[i], filters[i]) for i in self._diff_at]
        self._filters = (*chosen, self.batch_norms.holds, ...)
        self._graphdef, *states, self.statistics, self.state = _split(self._nodes, self._filters)
        self._differentiated = dict(zip(self._diff_at, states, strict=True))

    def as_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with states to differentiate in place of modules, and nothing in place of the others."""
        none = nnx.State[Any, Any]({})
        for i, state in self._differentiated.items():
            if not jax.tree.leaves(self._with(i, args[i], state)):
                raise OptionError(
                    f"argument {i} holds no variable that its filter takes: there is nothing to differentiate"
                )
        replaced = [self._with(i, arg, self._differentiated.get(i, none)) for i, arg in enumerate(args)]
        return tuple(replaced), {name: self._with(name, arg, none) for name, arg in kwargs.items()}

    def call(
        self, fun: Callable[..., Any], statistics: State, state: State, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, State, State]:
        """`fun` with modules made of these states; what it returned, and the statistics and the state it left."""
        states = [nnx.State(self._holders[i].taken(args[i])) for i in self._diff_at]
        statistics = jax.tree.map(lambda leaf: leaf, statistics)  # as variables of this trace
        nodes = nnx.merge(self._graphdef, *states, statistics, state)
        given = [self._with(i, arg, nodes) for i, arg in enumerate(args)]
        returned = fun(*given, **{name: self._with(name, arg, nodes) for name, arg in kwargs.items()})
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

    def _with(self, where: Where, arg: Any, replaced: Mapping[str, Any]) -> Tree:
        return self._holders[where].put(arg, replaced) if where in self._holders else arg


class _Holder:
    """An argument, and the modules among its leaves by a name that no other argument has.

    Args:
        where: which argument.
        arg: what was given.
    """

    def __init__(self, where: Where, arg: Any) -> None:
        leaves, structure = jax.tree.flatten(arg, is_leaf=_is_node)
        self._structure: Any = structure
        self._names = [f"{where}.{k}" if _is_node(leaf) else None for k, leaf in enumerate(leaves)]
        self.nodes = self.taken(arg)

    def taken(self, tree: Tree) -> dict[str, Any]:
        """What stands in the modules' places, by name."""
        leaves = zip(self._names, self._structure.flatten_up_to(tree), strict=True)
        return {name: leaf for name, leaf in leaves if name}

    def put(self, tree: Tree, replaced: Mapping[str, Any]) -> Tree:
        """The tree with these in the modules' places; an empty state where there is none."""
        leaves = zip(self._names, self._structure.flatten_up_to(tree), strict=True)
        return self._structure.unflatten([replaced.get(name, nnx.State({})) if name else leaf for name, leaf in leaves])


def _split(nodes: dict[str, Any], filters: tuple[Any, ...]) -> tuple[Any, ...]:
    parts: tuple[Any, ...] = nnx.split(nodes, *filters)
    return parts


def _is_node(value: Any) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _under(holder: _Holder, filter: Any) -> Callable[[tuple[Any, ...], Any], bool]:
    predicate = nnx.filterlib.to_predicate(filter)
    return lambda path, variable: path[0] in holder.nodes and predicate(path[1:], variable)


def _refuse_other_variables(before: State, after: State) -> None:
    """What one piece leaves is what the next one takes."""
    other = {path for path, _ in nnx.to_flat_state(before)} ^ {path for path, _ in nnx.to_flat_state(after)}
    if other:
        named = ", ".join(sorted(".".join(map(str, path[1:])) for path in other))
        raise LossError(
            f"the loss function adds or removes variables of the model ({named}): pop them inside it and return them "
            "as aux, or make them before"
        )
