"""Bad input is one clear error, raised while tracing."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from problems import loss_fn, make_batch, make_params, squares

from wholebatch import Mean, Sum, WholeBatchError
from wholebatch.jax import grad, value_and_grad

PARAMS, (X, Y) = {"out": np.ones(8), "in": {"w": np.ones((3, 8)), "b": np.ones(8)}}, (np.ones((10, 3)), np.ones(10))

OPTIONS = [
    ({"micro_batch_size": 0}, ValueError, "micro_batch_size must be at least 1, got 0"),
    ({"micro_batch_size": -3}, ValueError, "micro_batch_size must be at least 1, got -3"),
    ({"micro_batch_size": 2.5}, TypeError, "micro_batch_size must be a positive integer, got 2.5"),
    ({"num_micro_batches": "4"}, TypeError, "num_micro_batches must be a positive integer, got '4'"),
    ({"micro_batch_size": 2, "num_micro_batches": 4}, ValueError, "both micro_batch_size=2 and num_micro_batches=4"),
    ({"accum_dtype": jnp.int32}, TypeError, 'accum_dtype must be "auto" or a floating point dtype'),
    ({"accum_dtype": "wide"}, TypeError, 'accum_dtype must be "auto" or a floating point dtype'),
    ({"aux": "median"}, ValueError, "aux must hold 'auto'"),
]


@pytest.mark.parametrize(("options", "kind", "message"), OPTIONS, ids=[m for _, _, m in OPTIONS])
def test_options(options, kind, message):
    with pytest.raises(kind, match=message) as raised:
        value_and_grad(loss_fn, **options)
    assert isinstance(raised.value, WholeBatchError)


LOSSES = [
    (lambda p, x, y: squares(p, x, y), "the loss must be a scalar, got shape \\(4,\\): return Mean.of"),
    (lambda p, x, y: None, "the loss must be a scalar array, .* got None of type NoneType"),
    (lambda p, x, y: np.float64(1), "the loss must be a scalar array.* of type float64"),
    (lambda p, x, y: len(y), "the loss must be a scalar array.* got 4 of type int"),
    (lambda p, x, y: jnp.asarray(3), "the loss must be real and floating point, got int"),
    (lambda p, x, y: jnp.asarray(3j), "the loss must be real and floating point, got complex"),
    (lambda p, x, y: {}, "a mapping with no terms"),
    (lambda p, x, y: {1: y.sum()}, "terms are named by strings, got the key 1 of type int"),
    (lambda p, x, y: {"a": y}, "term 'a' must be a scalar, got shape \\(4,\\)"),
    (lambda p, x, y: Mean(y.sum(), -1), "the count of the loss must be finite and not negative, got -1"),
    (lambda p, x, y: Mean(y.sum(), float("nan")), "the count of the loss must be finite and not negative, got nan"),
    (lambda p, x, y: Mean(y.sum(), y), "the count of the loss must be a scalar, got shape \\(4,\\): sum it first"),
    (lambda p, x, y: Mean(y.sum(), None), "the count of the loss must be a number or a scalar array, got None"),
    (lambda p, x, y: Mean(y.sum(), "4"), "the count of the loss must be a number or a scalar array, got '4'"),
    (lambda p, x, y: {"a": Mean(y, 4)}, "the total of term 'a' must be a scalar, got shape"),
    (lambda p, x, y: Sum(y), "the total of the loss must be a scalar, got shape"),
    (lambda p, x, y: (y.sum(), {}), "returned a tuple of 2: give has_aux=True"),
    (lambda p, x, y: {"a": y.sum()} | ({"b": y.sum()} if len(y) == 4 else {}), "terms differ between pieces: 'b'"),
    (lambda p, x, y: Mean(y.sum(), 4) if len(y) == 4 else y.sum(), "divided by its own count and rows, depending on"),
]


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize(("loss", "message"), LOSSES, ids=[message for _, message in LOSSES])
def test_losses(loss, message, jit):
    with pytest.raises(WholeBatchError, match=message) as raised:
        jit(value_and_grad(loss, micro_batch_size=4))(PARAMS, X, Y)
    assert isinstance(raised.value, ValueError | TypeError)


def run(*args, **options):
    return value_and_grad(lambda params, x, y=None: jnp.sum(x), **options)(*args)


CALLS = [
    (lambda: run(PARAMS, X, Y[:8]), "batch rows differ: x has 10, y has 8; .* batch_argnums"),
    (lambda: run(PARAMS, {"a": [X, Y[:8]]}), r"batch rows differ: x\['a'\]\[0\] has 10, x\['a'\]\[1\] has 8"),
    (lambda: run(PARAMS, X[:0], Y[:0]), "the batch is empty: its arrays have 0 rows"),
    (lambda: run(PARAMS, 3.0), "no array with rows in the batch, which is x: there is nothing to cut"),
    (lambda: run(PARAMS, X, batch_argnums=()), "no array with rows in the batch, which is nothing"),
    (lambda: run(PARAMS, X, batch_argnums=(0, 1)), r"argument 0 \(params\) is in both argnums and batch_argnums"),
    (lambda: run(PARAMS, X, rng_argnums=0), r"argument 0 \(params\) is in both argnums and rng_argnums"),
    (lambda: run(PARAMS, X, argnums=5), "argnums holds 5, but 2 positional arguments were given"),
    (lambda: run(PARAMS, X, batch_argnums="x"), "batch_argnums must hold positions of arguments, got 'x'"),
    (lambda: run(PARAMS, X, batch_argnums=2), "batch_argnums holds 2, but 2 positional arguments were given"),
    (lambda: run(PARAMS, X, batch_argnames="z"), "batch_argnames holds 'z', which is not among the arguments given by"),
    (lambda: run({"n": np.arange(3)}, X), r"params\['n'\] is int64: only floating point arrays can be differentiated"),
    (lambda: run({"f": len}, X), r"params\['f'\] is builtin_function_or_method: only arrays can be differentiated"),
    (lambda: grad(loss_fn, return_terms=True), "return_terms is for value_and_grad"),
    (
        lambda: value_and_grad(loss_fn, has_aux=True, micro_batch_size=4)(PARAMS, X, Y),
        r"must return a pair \(loss, aux\)",
    ),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_calls(call, message):
    with pytest.raises(WholeBatchError, match=message) as raised:
        call()
    assert isinstance(raised.value, ValueError | TypeError)


def test_rows_that_are_not_known_while_tracing():
    (rows,) = jax.export.symbolic_shape("rows")
    with pytest.raises(ValueError, match=r"the rows of x are not known while tracing: its shape is \(rows, 3\)"):
        jax.eval_shape(
            value_and_grad(loss_fn, micro_batch_size=4),
            make_params(),
            jax.ShapeDtypeStruct((rows, 3), float),
            jax.ShapeDtypeStruct((rows,), float),
        )


def test_good_input_is_not_refused():
    value_and_grad(loss_fn, micro_batch_size=np.int64(4))(make_params(), *make_batch())
