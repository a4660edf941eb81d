"""The gradient over chunks is that of the full batch, under every transformation."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from reference import assert_exact
from wholebatch import BatchError, OptionError, OptionTypeError
from wholebatch.recipes.scan import microbatched_grads


@pytest.fixture
def in_float64():
    with jax.enable_x64(True):
        yield


def make_data(n=12):
    random = np.random.default_rng(0)
    return random.normal(size=n), random.normal(size=n)


def by_hand(w, x, y):
    return {"w": np.asarray(2 * np.sum(x * (w * x - y)))}


@pytest.mark.parametrize("chunks", [1, 3.0, 12, np.float32(6)], ids=str)
def test_the_sum_over_chunks_is_the_full_gradient(in_float64, chunks):
    x, y = make_data()
    assert_exact({"w": microbatched_grads(0.7, 0.3, x, y, chunks)}, by_hand(0.7, x, y))


def test_the_mean_over_chunks_is_not():
    x, y = make_data()
    parts = [by_hand(0.7, x[:6], y[:6])["w"], by_hand(0.7, x[6:], y[6:])["w"]]
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact({"w": np.mean(parts)}, by_hand(0.7, x, y))


def test_the_textbook_example_is_60():
    gradient = microbatched_grads(1.0, 0.0, jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.zeros(4), 2)
    assert gradient.shape == ()
    assert gradient.dtype == jnp.float32
    assert gradient == 60
    assert microbatched_grads(1, 0, [1, 2, 3, 4], 0, 2.0) == 60, "integers and one target for all will do"


def test_it_is_one_scan_of_as_many_steps_as_there_are_chunks():
    x, y = make_data()
    program = str(jax.make_jaxpr(lambda w: microbatched_grads(w, 0.0, x, y, 3.0))(0.7))
    assert program.count("scan[") == 1
    assert "length=3" in program


def test_it_can_be_differentiated_again(in_float64):
    x, y = make_data()
    second = {"w": jax.grad(microbatched_grads)(0.7, 0.3, x, y, 4)}
    assert_exact(second, {"w": np.asarray(2 * np.sum(x**2))})
    assert jax.grad(microbatched_grads, argnums=1)(0.7, 0.3, x, y, 4) == 0, "b is not used"


def test_it_runs_under_jit_with_a_static_number_of_chunks(in_float64):
    x, y = make_data()
    jitted = jax.jit(microbatched_grads, static_argnums=4)
    assert_exact({"w": jitted(0.7, 0.3, x, y, 4.0)}, by_hand(0.7, x, y))
    with pytest.raises(OptionTypeError, match="n_microbatches is traced, .* jit with static_argnums=4"):
        jax.jit(microbatched_grads)(0.7, 0.3, x, y, 4.0)


def test_chunks_that_do_not_divide_the_rows_are_an_error_that_names_both():
    x, y = make_data(10)
    with pytest.raises(BatchError, match="10 rows cannot be cut into 4 equal chunks"):
        microbatched_grads(1.0, 0.0, x, y, 4)


@pytest.mark.parametrize("number", [2.5, 0, -2, float("nan"), float("inf")], ids=str)
def test_a_number_of_chunks_that_is_not_whole_and_positive_is_refused(number):
    with pytest.raises(OptionError) as caught:
        microbatched_grads(1.0, 0.0, *make_data(), number)
    assert str(caught.value) == f"n_microbatches must be a positive whole number, got {number}"


def test_what_is_not_a_number_is_refused_too():
    with pytest.raises(OptionTypeError, match="n_microbatches must be a positive whole number, got 'two'"):
        microbatched_grads(1.0, 0.0, *make_data(), "two")
