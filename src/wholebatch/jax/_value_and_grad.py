"""The door: `value_and_grad` and `grad`, in place of JAX's own."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict, Unpack

from jax import Array
from jax import numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from .._errors import OptionError, OptionTypeError
from .._plan import check_sizes
from ._arguments import Argnums, Arguments
from ._aux import modes_by_leaf
from ._function import Function, Piece
from ._line import Whole, whole_batch
from ._mesh import Axis, check_axis, devices_for
from ._sums import SumDtype
from ._tree import Tree


class Options(TypedDict, total=False):
    """The options of `value_and_grad`."""

    batch_argnums: Argnums | None
    batch_argnames: str | Sequence[str]
    micro_batch_size: int | None
    num_micro_batches: int | None
    rng_argnums: Argnums
    accum_dtype: SumDtype
    aux: Tree
    return_terms: bool
    data_axis: Axis | None
    mesh: Mesh | AbstractMesh | None


def value_and_grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    batch_argnums: Argnums | None = None,
    batch_argnames: str | Sequence[str] = (),
    micro_batch_size: int | None = None,
    num_micro_batches: int | None = None,
    rng_argnums: Argnums = (),
    accum_dtype: SumDtype = "auto",
    aux: Tree = "auto",
    return_terms: bool = False,
    data_axis: Axis | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Callable[..., Any]:
    """The loss of a whole batch and its gradient, on the memory of a micro-batch.

    Takes the place of `jax.value_and_grad`: the function that it returns takes the same arguments and returns the
    same. Use it under `jit`, as that.

    Args:
        fun: returns a scalar (a mean over its rows), a `Mean`, a `Sum` or a mapping of these.
        argnums: which arguments to differentiate; one or several.
        has_aux: whether `fun` returns a pair of the loss and a tree of what else is to be reported.
        batch_argnums: which arguments are cut along their leading axis. By default all positional ones that are
            neither differentiated nor keys. Scalars among them, and what is not an array, go whole to each piece.
        batch_argnames: arguments given by name that are cut too.
        micro_batch_size: the most rows that a piece may have.
        num_micro_batches: the number of pieces, instead. Without either, the batch is one piece.
        rng_argnums: random keys, which are split: one for each piece. One piece gets the key as it is.
        accum_dtype: what gradients are summed in and returned as. "auto" sums 16-bit gradients in float32 and
            returns the parameters' dtype.
        aux: how what is reported is reduced, a mode or a tree prefix of modes: "mean", "sum", "stack", "concat", or
            "auto" (entries of rows are put together, other integers summed, the rest averaged).
        return_terms: return `(loss, terms)` in place of the loss, with each term's share by name.
        data_axis: the mesh axis (or several) that rows are sharded over. Each device sums its own rows, in pieces of
            its share of the size, and gradients cross the wire once. Keys are folded with the device's index.
        mesh: the mesh of `data_axis`; by default that of `jax.set_mesh`.

    >>> import jax
    >>> from jax import numpy as jnp
    >>> def loss_fn(params, x, y):
    ...     return jnp.mean((x @ params - y) ** 2)
    >>> x, y = jnp.ones((50, 3)), jnp.zeros(50)
    >>> loss, grads = jax.jit(value_and_grad(loss_fn, micro_batch_size=16))(jnp.ones(3), x, y)
    >>> float(loss), grads.shape
    (9.0, (3,))
    """
    check_options(micro_batch_size, num_micro_batches, accum_dtype, aux, data_axis, mesh)

    @functools.wraps(fun)
    def value_and_grad_of_fun(*args: Any, **kwargs: Any) -> Any:
        arguments = Arguments(
            fun,
            args,
            kwargs,
            argnums=argnums,
            batch_argnums=batch_argnums,
            batch_argnames=batch_argnames,
            rng_argnums=rng_argnums,
        )
        devices = devices_for(data_axis, mesh)
        cut = devices.cut(arguments.rows, micro_batch_size, num_micro_batches)

        def line(differentiated: tuple[Tree, ...], batch: list[Array], others: Tree) -> tuple[Whole, Whole]:
            keys, whole = others

            def of_piece(differentiated: tuple[Tree, ...], piece: Piece) -> tuple[Any, Tree]:
                return arguments.call(fun, differentiated, piece.batch, piece.keys, whole), ()

            return whole_batch(
                Function(of_piece, has_aux),
                differentiated,
                batch,
                keys,
                (),
                cut,
                accum_dtype=accum_dtype,
                aux=aux,
                devices=devices,
            )

        whole = devices.run(line, arguments.differentiated, arguments.batch, (arguments.keys, arguments.whole))
        gradients = whole.gradients if isinstance(argnums, Iterable) else whole.gradients[0]
        return value_of(whole, has_aux, return_terms), gradients

    return value_and_grad_of_fun


def grad(
    fun: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False, **options: Unpack[Options]
) -> Callable[..., Any]:
    """The gradient of a whole batch, in place of `jax.grad`; `(gradient, aux)` with `has_aux`.

    Args:
        fun: as for `value_and_grad`.
        argnums: as for `value_and_grad`.
        has_aux: as for `value_and_grad`.
        options: those of `value_and_grad`, such as `micro_batch_size=16`.

    >>> from jax import numpy as jnp
    >>> grad(lambda w, x: jnp.mean(x * w), micro_batch_size=2)(jnp.float32(1), jnp.arange(4.0)).item()
    1.5
    """
    if options.get("return_terms"):
        raise OptionError("return_terms is for value_and_grad: grad returns no value")
    both = value_and_grad(fun, argnums, has_aux, **options)

    @functools.wraps(fun)
    def grad_of_fun(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return grad_of_fun


def check_options(
    micro_batch_size: Any, num_micro_batches: Any, accum_dtype: Any, aux: Tree, data_axis: Any, mesh: Any
) -> None:
    """Refuse options that cannot be meant, before any call."""
    check_sizes(micro_batch_size, num_micro_batches)
    check_axis(data_axis, mesh)
    if accum_dtype != "auto" and not _is_floating(accum_dtype):
        raise OptionTypeError(f'accum_dtype must be "auto" or a floating point dtype, got {accum_dtype!r}')
    if isinstance(aux, str):
        modes_by_leaf(aux, ())


def _is_floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(dtype, jnp.floating))
    except TypeError:
        return False


def value_of(whole: Whole, has_aux: bool, return_terms: bool) -> Any:
    """What is returned beside the gradients."""
    value = (whole.loss, whole.terms) if return_terms else whole.loss
    return (value, whole.aux) if has_aux else value
