"""Arguments: which are differentiated, which are cut, which are random keys, and which go whole to each piece."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from .._errors import BatchError, OptionError, OptionTypeError
from ._tree import Tree, is_array_like

Argnums = int | Sequence[int]


class Arguments:
    """One call's arguments, sorted by what happens to them.

    Args:
        fun: the user's function, for the names of its parameters.
        args: the positional arguments.
        kwargs: the others.
        argnums: what is differentiated.
        batch_argnums: what is cut; None for all positional arguments that are neither differentiated nor keys.
        batch_argnames: arguments given by name that are cut too.
        rng_argnums: random keys, of which each piece gets its own.
        whole_argnums: what goes whole to each piece unless `batch_argnums` says otherwise.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        argnums: Argnums,
        batch_argnums: Argnums | None,
        batch_argnames: str | Sequence[str],
        rng_argnums: Argnums,
        whole_argnums: Sequence[int] = (),
    ) -> None:
        self._args, self._kwargs = args, kwargs
        self._names = _names(fun, len(args))
        self._diff_at = _positions("argnums", argnums, len(args))
        self._keys_at = _positions("rng_argnums", rng_argnums, len(args))
        others = [i for i in range(len(args)) if i not in (*self._diff_at, *self._keys_at, *whole_argnums)]
        self._batch_at = others if batch_argnums is None else _positions("batch_argnums", batch_argnums, len(args))
        self._batch_names = [batch_argnames] if isinstance(batch_argnames, str) else list(batch_argnames)
        self._refuse_overlap()
        self.differentiated = tuple(self._arrays_to_differentiate(i) for i in self._diff_at)
        self.keys = tuple(args[i] for i in self._keys_at)
        self._leaves, self._tree = jax.tree.flatten(self._given_batch())
        self._cut = [bool(getattr(leaf, "shape", ())) for leaf in self._leaves]
        self.rows = self._shared_rows()
        self.batch = [jnp.asarray(leaf) for leaf, cut in zip(self._leaves, self._cut, strict=True) if cut]
        self._others_at = [i for i in range(len(args)) if i not in (*self._diff_at, *self._keys_at, *self._batch_at)]
        self._other_leaves, self._other_tree = jax.tree.flatten(self._given_besides())
        uncut = [leaf for leaf, cut in zip(self._leaves, self._cut, strict=True) if not cut]
        self.whole = [leaf for leaf in (*uncut, *self._other_leaves) if isinstance(leaf, Array)]

    def paths(self) -> list[str]:
        """What the user calls the arrays that are cut."""
        return [where for (where, _), cut in zip(self._leaves_by_path(), self._cut, strict=True) if cut]

    def call(
        self,
        fun: Callable[..., Any],
        differentiated: tuple[Tree, ...],
        batch: list[Array],
        keys: tuple[Tree, ...],
        whole: list[Array] | None = None,
    ) -> Any:
        """`fun` with these in the places of what was given."""
        rows, arrays = iter(batch), iter(self.whole if whole is None else whole)

        def in_place(leaf: Any, cut: bool = False) -> Any:
            return next(rows) if cut else next(arrays) if isinstance(leaf, Array) else leaf

        positional, by_name = jax.tree.unflatten(self._tree, map(in_place, self._leaves, self._cut))
        others, others_by_name = jax.tree.unflatten(self._other_tree, map(in_place, self._other_leaves))
        args = list(self._args)
        for places, values in (
            (self._diff_at, differentiated),
            (self._keys_at, keys),
            (self._batch_at, positional),
            (self._others_at, others),
        ):
            for i, value in zip(places, values, strict=True):
                args[i] = value
        return fun(*args, **others_by_name, **by_name)

    def _given_batch(self) -> Tree:
        missing = [name for name in self._batch_names if name not in self._kwargs]
        if missing:
            raise OptionError(f"batch_argnames holds {missing[0]!r}, which is not among the arguments given by name")
        return [self._args[i] for i in self._batch_at], {name: self._kwargs[name] for name in self._batch_names}

    def _leaves_by_path(self) -> Iterator[tuple[str, Any]]:
        """Every leaf of the batch in the order of the tree, with what the user calls it."""
        for (kind, which, *path), leaf in jax.tree_util.tree_leaves_with_path(self._given_batch()):
            name = which.key if kind.idx else self._names[self._batch_at[which.idx]]
            yield name + jax.tree_util.keystr(tuple(path)), leaf

    def _given_besides(self) -> Tree:
        """What goes whole to each piece, besides what of the batch has no rows."""
        by_name = {name: arg for name, arg in self._kwargs.items() if name not in self._batch_names}
        return [self._args[i] for i in self._others_at], by_name

    def _refuse_overlap(self) -> None:
        roles = {"argnums": self._diff_at, "rng_argnums": self._keys_at, "batch_argnums": self._batch_at}
        for i, name in enumerate(self._names):
            taken = [role for role, places in roles.items() if i in places]
            if len(taken) > 1:
                raise OptionError(
                    f"argument {i} ({name}) is in both {taken[0]} and {taken[1]}: what is differentiated or split as a "
                    "key cannot be cut along its rows"
                )

    def _arrays_to_differentiate(self, i: int) -> Tree:
        """JAX's own rule, said with the path of the leaf."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(self._args[i]):
            where = self._names[i] + jax.tree_util.keystr(path)
            if not is_array_like(leaf):
                raise OptionTypeError(f"{where} is {type(leaf).__name__}: only arrays can be differentiated")
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                raise OptionTypeError(
                    f"{where} is {jnp.result_type(leaf)}: only floating point arrays can be differentiated; move it to "
                    "another argument, or partition the tree"
                )
        return self._args[i]

    def _shared_rows(self) -> int:
        rows: int | None = None
        first = ""
        for where, leaf in self._leaves_by_path():
            shape = getattr(leaf, "shape", ())
            if not shape:
                continue
            if not isinstance(shape[0], int):
                raise BatchError(f"the rows of {where} are not known while tracing: its shape is {shape}")
            if rows is None:
                rows, first = shape[0], where
            elif shape[0] != rows:
                raise BatchError(
                    f"batch rows differ: {first} has {rows}, {where} has {shape[0]}; if one of them is not part of "
                    "the batch, say what is with batch_argnums"
                )
        if rows is None:
            given = ", ".join([*(self._names[i] for i in self._batch_at), *self._batch_names]) or "nothing"
            raise BatchError(f"no array with rows in the batch, which is {given}: there is nothing to cut")
        if rows == 0:
            raise BatchError("the batch is empty: its arrays have 0 rows")
        return rows


def _positions(option: str, given: Argnums, count: int) -> list[int]:
    """Indices into the positional arguments, counted from the front."""
    places = list(given) if isinstance(given, Iterable) else [given]
    for place in places:
        if not isinstance(place, int | np.integer):
            raise OptionTypeError(f"{option} must hold positions of arguments, got {place!r}")
        if not -count <= place < count:
            raise OptionError(f"{option} holds {place}, but {count} positional arguments were given")
    return [place % count for place in places]


def _names(fun: Callable[..., Any], count: int) -> list[str]:
    """What the user calls the positional arguments."""
    try:
        parameters = inspect.signature(fun).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    except (TypeError, ValueError):  # some callables do not tell
        names = []
    return [names[i] if i < len(names) else f"argument {i}" for i in range(count)]
