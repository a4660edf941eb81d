"""The door for Flax NNX: `value_and_grad`, in place of `nnx.value_and_grad`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

from flax import nnx
from jax import Array

from .._errors import OptionError
from . import _statistics
from ._arguments import Arguments
from ._function import Function, Piece
from ._graph import Graph
from ._line import Whole, whole_batch
from ._mesh import devices_for
from ._replicas import refuse_what_differs, with_keys_of, with_own_keys
from ._tree import Tree
from ._value_and_grad import Options, check_options, value_of

__all__ = ["value_and_grad"]

DiffArg = int | nnx.DiffState


def value_and_grad(
    fun: Callable[..., Any],
    argnums: DiffArg | Sequence[DiffArg] = 0,
    has_aux: bool = False,
    *,
    batch_norm: Literal["refuse", "micro"] = "refuse",
    **options: Unpack[Options],
) -> Callable[..., Any]:
    """The loss of a whole batch and its gradient with respect to a module, in place of `nnx.value_and_grad`.

    Arguments that hold modules are not cut. What changes in them besides the gradient's variables (random counts,
    statistics, caches) is handed from piece to piece and written back.

    Args:
        fun: takes the model and the batch; returns what `wholebatch.jax.value_and_grad` says.
        argnums: which arguments to differentiate: their `nnx.Param`s, or what an `nnx.DiffState` says.
        has_aux: whether `fun` returns a pair of the loss and a tree of what else is to be reported.
        batch_norm: "refuse" to cut a batch that BatchNorm sees in training mode, or accept normalisation by
            "micro"-batch, with running statistics that follow the whole batch.
        options: those of `wholebatch.jax.value_and_grad`, such as `micro_batch_size=16`.

    >>> import optax
    >>> from jax import numpy as jnp
    >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    >>> def loss_fn(model, x, y):
    ...     return jnp.mean((model(x) - y) ** 2)
    >>> loss, grads = value_and_grad(loss_fn, micro_batch_size=16)(model, jnp.ones((50, 3)), jnp.zeros((50, 1)))
    >>> _ = optimizer.update(model, grads)
    """
    if batch_norm not in ("refuse", "micro"):
        raise OptionError(f'batch_norm must be "refuse" or "micro", got {batch_norm!r}')
    micro_batch_size, num_micro_batches = options.get("micro_batch_size"), options.get("num_micro_batches")
    accum_dtype, aux = options.get("accum_dtype", "auto"), options.get("aux", "auto")
    data_axis, mesh = options.get("data_axis"), options.get("mesh")
    check_options(micro_batch_size, num_micro_batches, accum_dtype, aux, data_axis, mesh)
    warned = False

    @functools.wraps(fun)
    def value_and_grad_of_fun(*args: Any, **kwargs: Any) -> Any:
        filters = _filters(argnums, len(args))
        graph = Graph(args, kwargs, filters)
        args, kwargs = graph.as_arguments(args, kwargs)
        arguments = Arguments(
            fun,
            args,
            kwargs,
            argnums=list(filters),
            batch_argnums=options.get("batch_argnums"),
            batch_argnames=options.get("batch_argnames", ()),
            rng_argnums=options.get("rng_argnums", ()),
            whole_argnums=[i for i in graph.positions if i not in filters],
        )
        devices = devices_for(data_axis, mesh)
        cut = devices.cut(arguments.rows, micro_batch_size, num_micro_batches)
        sizes = cut.sizes * devices.number

        def line(differentiated: tuple[Tree, ...], batch: list[Array], others: Tree) -> tuple[Whole, Whole]:
            keys, whole, statistics, state = others

            def of_piece(differentiated: tuple[Tree, ...], piece: Piece) -> tuple[Any, Tree]:
                def with_modules(*args: Any, **kwargs: Any) -> Any:
                    return graph.call(fun, statistics, piece.state, args, kwargs)

                returned, *left = arguments.call(with_modules, differentiated, piece.batch, piece.keys, whole)
                if len(sizes) > 1:
                    judge(graph.statistics_seen((statistics, piece.state), left))
                loss, reported = returned if has_aux else (returned, ())
                return (loss, (reported, graph.written(statistics, left[0]))), left[1]

            function = Function(of_piece, has_aux=True)
            own_state = with_own_keys(state, devices.own_keys)
            came_to, own = whole_batch(
                function,
                differentiated,
                batch,
                keys,
                own_state,
                cut,
                accum_dtype=accum_dtype,
                aux=(aux, "stack"),
                devices=devices,
            )
            if devices.number > 1:

                def step(state: Tree, own: Tree) -> Tree:
                    return function(differentiated, Piece(own[0], own[1], state)).state

                refuse_what_differs(step, own_state, (cut.piece(batch, 0), keys))
            return came_to._replace(state=with_keys_of(came_to.state, state)), own

        others = arguments.keys, arguments.whole, graph.statistics, graph.state
        whole = devices.run(line, arguments.differentiated, arguments.batch, others)
        reported, left_statistics = whole.aux
        graph.update(whole.state, graph.batch_norms.pooled(left_statistics, sizes))
        gradients = whole.gradients if isinstance(argnums, Sequence) else whole.gradients[0]
        whole = whole._replace(aux=reported)
        return value_of(whole, has_aux, options.get("return_terms", False)), gradients

    def judge(written: list[str]) -> None:
        nonlocal warned
        if written and batch_norm == "refuse":
            _statistics.refuse(written)
        if written and not warned:
            warned = True
            _statistics.warn(written)

    return value_and_grad_of_fun


def _filters(argnums: DiffArg | Sequence[DiffArg], count: int) -> dict[int, Any]:
    """What to differentiate of each argument, by its position."""
    given = argnums if isinstance(argnums, Sequence) else [argnums]
    filters: dict[int, Any] = {}
    for one in given:
        position, chosen = (one.argnum, one.filter) if isinstance(one, nnx.DiffState) else (one, nnx.Param)
        if not -count <= position < count:
            raise OptionError(f"argnums holds {position}, but {count} positional arguments were given")
        if position % count in filters:
            raise OptionError(f"argnums holds {position} twice")
        filters[position % count] = chosen
    return filters
