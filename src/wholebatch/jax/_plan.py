"""Plan: which micro-batch fits a memory budget, from what the compiler says of the program.

    peak = arguments + results - shared by both + temporaries

The step is compiled for a few sizes, and never run: for those that decide, and for enough others that the peaks of all
lie on lines between them.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax

from .._budget import Plan, bytes_of, fitted, interpolated, largest_that_fits
from .._errors import OptionError, OptionTypeError
from ._arguments import Arguments
from ._mesh import devices_for
from ._tree import Tree
from ._value_and_grad import Options, value_and_grad

STRAIGHT = 0.01
"""How far a peak may be from the line through others, so that no more sizes are compiled."""

TRIES = 2
"""How many sizes are tried that leave a remainder: it takes a program of its own, and memory that fits no line."""

GROWTH = 4
"""By what factor sizes grow where peaks lie on no line."""


def plan(
    fun: Callable[..., Any],
    params: Tree,
    *batch: Any,
    memory: int | str,
    optimizer: Any = None,
    has_aux: bool = False,
    **options: Unpack[Options],
) -> Plan:
    """The largest micro-batch whose step fits a memory budget, without running it.

    What is planned is one program: the gradient of the whole batch and, with an optimizer, its update, with parameters
    and state donated. Several devices have the budget each.

    Args:
        fun: as for `value_and_grad`, called as `fun(params, *batch)`.
        params: what to differentiate: a tree of arrays or of `jax.ShapeDtypeStruct`s, or an NNX module.
        batch: the other arguments, as arrays or shapes.
        memory: the budget of a device: bytes, or such as "24GiB".
        optimizer: optax's, or what has the same `init` and `update`.
        has_aux: as for `value_and_grad`.
        options: those of `value_and_grad`, where `params` is argument 0, but for the sizes.

    >>> from jax import numpy as jnp
    >>> def loss_fn(w, x, y):
    ...     return jnp.mean((jnp.tanh(x @ w) - y) ** 2)
    >>> w, x, y = (jax.ShapeDtypeStruct(shape, "float32") for shape in [(256, 256), (4096, 256), (4096, 256)])
    >>> plan(loss_fn, w, x, y, memory="12MiB").micro_batch_size < 4096
    True
    """
    budget = bytes_of(memory)
    sizes = options.keys() & {"micro_batch_size", "num_micro_batches"}
    if sizes:
        raise OptionError(f"{sizes.pop()} is what plan finds: leave it out")
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise OptionTypeError(f"optimizer must have init and update, as optax's do, got {type(optimizer).__name__}")
    programs = _Programs(fun, params, batch, optimizer, has_aux, options)
    remarks = () if optimizer is not None else ("no optimizer was given: its state and its step are not counted",)
    rows, peak, unit = programs.rows, programs.peak, programs.unit
    even = [size for size in range(unit, rows + 1, unit) if rows % size == 0] or [rows]
    chosen = largest_that_fits(peak, even, budget)
    if chosen < rows:
        next_one = even[even.index(chosen) + 1]
        chosen = largest_that_fits(peak, range(chosen, next_one + 1, unit), budget, tries=TRIES)
    return fitted(chosen, peak, programs.parts, rows=rows, memory=budget, sizes=programs.curve, remarks=remarks)


class _Programs:
    """The step for any size of the pieces, compiled when it is asked for."""

    def __init__(
        self, fun: Callable[..., Any], params: Tree, batch: tuple[Any, ...], optimizer: Any, has_aux: bool, options: Any
    ) -> None:
        self._of_state, self._params, self._rest = _functional(fun, params)
        self._batch = batch
        self._optimizer = optimizer
        self._options = {"has_aux": has_aux, **options}
        self._state = () if optimizer is None else jax.eval_shape(optimizer.init, self._params)
        self._peaks: dict[int, int] = {}
        self.unit = devices_for(options.get("data_axis"), options.get("mesh")).number
        self.rows = self._count_rows()

    def peak(self, size: int) -> int:
        """The bytes that a device holds while it runs the step with pieces of that many rows."""
        if size not in self._peaks:
            self._peaks[size] = self._compile(size)
        return self._peaks[size]

    def curve(self, chosen: int) -> Mapping[int, int]:
        """The peaks of some sizes, from one row to the whole batch."""
        least, half = self.unit, self._largest_part()
        if self.rows > least:
            ends = {size: self.peak(size) for size in (least, half)}
            between = [size for size in self._peaks if least < size < half and not self.rows % size]
            middle = max(between) if between else self._largest_part(math.isqrt(least * half))
            if abs(interpolated(ends, self.rows, middle) - self.peak(middle)) > STRAIGHT * self.peak(middle):
                for power in range(1, self.rows.bit_length()):
                    if least * GROWTH**power < self.rows:
                        self.peak(least * GROWTH**power)
        return {size: self.peak(size) for size in {self.rows, chosen, *self._peaks}}

    def parts(self, size: int, peak: int) -> Mapping[str, int]:
        """What the peak consists of, by the shapes of what goes in and out."""
        parts = {
            "parameters": _bytes(self._params) + _bytes(self._rest),
            "gradients": _bytes(self._params),
            "optimizer": _bytes(self._state),
        }
        rest = peak - sum(parts.values())
        per_row = min(self._growth(size), max(rest, 0) // size)
        return parts | {"activations_per_row": per_row, "fixed": rest - per_row * size}

    def _growth(self, size: int) -> int:
        """By how many bytes the peak grows with a row, where there is no remainder: of one piece, or of several."""
        half = self._largest_part()
        less, more = (half, size) if size == self.rows else (self.unit, half)
        return 0 if less == more else max(0, self.peak(more) - self.peak(less)) // (more - less)

    def _largest_part(self, most: int | None = None) -> int:
        """About half of the batch, or about `most`, without a remainder if such a size is near."""
        most = self.rows // 2 if most is None else most
        most = max(self.unit, most - most % self.unit)
        return next((size for size in range(most, most // 2, -self.unit) if self.rows % size == 0), most)

    def _compile(self, size: int) -> int:
        def step(params: Tree, state: Tree, rest: Tree, *batch: Any) -> Any:
            of_params = self._of_state(rest)
            value, gradients = value_and_grad(of_params, micro_batch_size=size, **self._options)(params, *batch)
            if self._optimizer is None:
                return value, gradients
            updates, state = self._optimizer.update(gradients, state, params)
            return value, jax.tree.map(lambda p, update: (p + update).astype(p.dtype), params, updates), state

        donated = () if self._optimizer is None else (0, 1)
        lowered = jax.jit(step, donate_argnums=donated).lower(self._params, self._state, self._rest, *self._batch)
        needed = lowered.compile().memory_analysis()
        if needed is None:
            raise OptionError(f"the compiler for {jax.default_backend()} does not say what memory a program takes")
        held = needed.argument_size_in_bytes + needed.output_size_in_bytes - needed.alias_size_in_bytes
        return int(held + needed.temp_size_in_bytes)

    def _count_rows(self) -> int:
        rows = 0

        def look(params: Tree, rest: Tree, *batch: Any) -> None:
            nonlocal rows
            rows = Arguments(
                self._of_state(rest),
                (params, *batch),
                {},
                argnums=0,
                batch_argnums=self._options.get("batch_argnums"),
                batch_argnames=(),
                rng_argnums=self._options.get("rng_argnums", ()),
            ).rows

        jax.eval_shape(look, self._params, self._rest, *self._batch)
        return rows


def _functional(fun: Callable[..., Any], params: Tree) -> tuple[Callable[[Tree], Callable[..., Any]], Tree, Tree]:
    """A function of arrays, given what else a module holds; only who uses NNX can have a module."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(params, nnx.Pytree):
        return (lambda rest: fun), params, ()
    graphdef, state, rest = nnx.split(params, nnx.Param, ...)

    def of_state(rest: Tree) -> Callable[..., Any]:
        return lambda state, *batch: fun(nnx.merge(graphdef, state, rest), *batch)

    return of_state, state, rest


def _bytes(tree: Tree) -> int:
    leaves = jax.tree.leaves(jax.eval_shape(lambda tree: tree, tree))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
