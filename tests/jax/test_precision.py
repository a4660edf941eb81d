"""Sums in float32 where gradients have 16 bits; dtypes as JAX's own."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from problems import assert_same, assert_same_types, loss_fn, make_batch, make_params, squares

from wholebatch import Mean, Sum
from wholebatch.jax import value_and_grad


def ones(dtype):
    return jnp.ones((), dtype), jnp.ones(1000, dtype)


def total(w, x):
    return Sum((w * x).sum())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_adding_1_a_thousand_times_gives_1000(dtype):
    loss, grads = value_and_grad(total, micro_batch_size=1)(*ones(dtype))
    assert grads == 1000
    assert loss == 1000
    assert grads.dtype == loss.dtype == dtype


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("size", [16001, 16384], ids=["a remainder", "equal pieces"])
def test_a_mean_of_many_rows_is_weighted_in_float32(dtype, size):
    """Its total is 330,000, which float16 does not hold."""

    def mean(w, x):
        return (w * x).mean(dtype=jnp.float32).astype(dtype)

    args = jnp.asarray(10.125, dtype), jnp.ones(32768, dtype)
    assert value_and_grad(mean, micro_batch_size=size)(*args)[0] == jax.value_and_grad(mean)(*args)[0] == 10.125


def test_summing_in_bfloat16_gives_256():
    _, grads = value_and_grad(total, micro_batch_size=1, accum_dtype=jnp.bfloat16)(*ones(jnp.bfloat16))
    assert grads == 256


@pytest.mark.parametrize("size", [1, 1000], ids=["pieces", "one piece"])
def test_an_explicit_dtype_is_also_the_returned_one(size):
    _, grads = value_and_grad(total, micro_batch_size=size, accum_dtype=jnp.float32)(*ones(jnp.bfloat16))
    assert grads.dtype == jnp.float32
    assert grads == 1000


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
@pytest.mark.parametrize("size", [3, 4, 10])
def test_dtypes_are_jaxs(dtype, size):
    params, batch = make_params(dtype=dtype), make_batch(dtype=dtype)
    split = value_and_grad(loss_fn, micro_batch_size=size)(params, *batch)
    assert_same_types(split, jax.value_and_grad(loss_fn)(params, *batch))


def test_dtypes_may_differ_between_leaves():
    params = make_params()
    params["out"] = params["out"].astype(jnp.bfloat16)
    split = value_and_grad(loss_fn, micro_batch_size=4)(params, *make_batch())
    assert_same_types(split, jax.value_and_grad(loss_fn)(params, *make_batch()))


def test_float32_agrees_to_its_rounding():
    params, batch = make_params(dtype=jnp.float32), make_batch(dtype=jnp.float32)
    split = value_and_grad(loss_fn, micro_batch_size=3)(params, *batch)
    assert_same(split, jax.value_and_grad(loss_fn)(params, *batch), tolerance=8 * 2**-23 * 2)


def test_plain_numbers_are_parameters_too():
    params = {"w": 2.0, "b": np.float32(1)}
    split = value_and_grad(lambda p, x: (p["w"] * x + p["b"]).mean(), micro_batch_size=2)(params, np.arange(4.0))
    assert split[0] == 4
    assert split[1]["w"] == 1.5


@pytest.mark.parametrize("size", [1, 7, 64])
def test_token_sums_do_not_overflow_float16(size):
    """A thousand tokens a row: two rows' sums pass 65,504, their mean's gradient is 60."""
    w, x = jnp.asarray(2.0, jnp.float16), jnp.full(64, 60, jnp.float16)

    def fun(w, x):
        return Mean(1000 * (w * x).astype(jnp.float32).sum(), 1000 * len(x))

    _, grads = jax.jit(value_and_grad(fun, micro_batch_size=size))(w, x)
    assert np.isclose(grads, 60, rtol=2e-3)
    naive = jax.grad(lambda w: fun(w, x).total)(w)
    assert not np.isfinite(naive)


def test_a_16_bit_loss_is_weighted_without_rounding_its_share():
    """A third is not a number of bfloat16, but three pieces of a third each are a whole."""
    w, x = jnp.ones((), jnp.bfloat16), jnp.ones(3, jnp.bfloat16)
    _, grads = value_and_grad(lambda w, x: (w * x).mean(), micro_batch_size=1, accum_dtype=jnp.float32)(w, x)
    assert np.isclose(grads, 1, rtol=1e-7)


def test_a_term_in_16_bits_beside_another():
    def fun(params, x, y):
        losses = squares(params, x, y)
        return {"a": losses.mean().astype(jnp.bfloat16), "b": Mean(losses.sum(), len(y))}

    loss, _ = value_and_grad(fun, micro_batch_size=4)(make_params(dtype=jnp.float32), *make_batch(dtype=jnp.float32))
    assert np.isfinite(loss)
