"""What is traced, what is compiled, and what it takes: counts and bytes, never times."""

import re

import jax
import pytest
from jax import numpy as jnp
from problems import assert_same, loss_fn, make_batch, make_params, squares

from wholebatch import Mean
from wholebatch.jax import value_and_grad


def counting(fun):
    def counted(*args):
        counted.traces += 1
        return fun(*args)

    counted.traces = 0
    return counted


def several_terms(params, x, y):
    losses = squares(params, x, y)
    return {"a": Mean.of(losses, where=y > 0), "b": Mean.of(losses, where=y < 0), "c": losses.mean()}


def with_aux(params, x, y):
    return loss_fn(params, x, y), {"losses": squares(params, x, y)}


@pytest.mark.parametrize("rows", [12, 10], ids=["equal pieces", "a remainder"])
@pytest.mark.parametrize("fun", [loss_fn, several_terms, with_aux], ids=["scalar", "terms", "aux"])
def test_the_loss_is_traced_at_most_twice(fun, rows):
    counted = counting(fun)
    step = jax.jit(value_and_grad(counted, has_aux=fun is with_aux, micro_batch_size=4))
    for _ in range(3):
        step(make_params(), *make_batch(rows))
    assert counted.traces <= 2
    assert step._cache_size() == 1


def test_one_piece_is_traced_once():
    counted = counting(loss_fn)
    jax.jit(value_and_grad(counted))(make_params(), *make_batch())
    assert counted.traces == 1


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("fun", [loss_fn, several_terms], ids=["scalar", "terms"])
def test_the_program_does_not_grow_with_the_number_of_pieces(fun):
    def size(rows):
        step = value_and_grad(fun, micro_batch_size=4)
        return len(list(equations(jax.make_jaxpr(step)(make_params(), *make_batch(rows)).jaxpr)))

    assert size(16) == size(1024)
    assert size(17) == size(1025)


def compiled(fun, rows, size, width=3):
    params = {"in": {"w": jnp.ones((width, 8)), "b": jnp.zeros(8)}, "out": jnp.ones(8)}
    step = jax.jit(value_and_grad(fun, micro_batch_size=size))
    return step.lower(params, jnp.ones((rows, width)), jnp.ones(rows)).compile()


@pytest.mark.parametrize("fun", [loss_fn, several_terms], ids=["scalar", "terms"])
def test_what_is_compiled_is_as_long_for_256_pieces_as_for_4(fun):
    """So it takes as long to compile; the clock would say so less surely."""
    few, many = (compiled(fun, 4 * pieces, 4).as_text().count("\n") for pieces in (4, 256))
    assert many <= 1.05 * few


def products(program):
    return len(re.findall(r"= [^=]*\bdot\(", program.as_text()))


def test_counting_beforehand_costs_no_forward():
    """The scan that adds up counts holds no matrix product: the compiler has dropped the model from it."""
    one = compiled(lambda p, x, y: Mean.of(squares(p, x, y), where=y > 0), 64, 4)
    assert products(compiled(several_terms, 64, 4)) == products(one) > 0


def test_a_count_that_needs_the_model_keeps_it():
    """The negative control: there the products are counted twice."""

    def needs_the_model(params, x, y):
        losses = squares(params, x, y)
        return {"a": Mean.of(losses, where=losses > 0.1), "b": losses.mean()}

    one = compiled(lambda p, x, y: Mean.of(squares(p, x, y), where=y > 0), 64, 4)
    assert products(compiled(needs_the_model, 64, 4)) > products(one)


@pytest.mark.parametrize("tail", [0, 1], ids=["equal pieces", "a remainder"])
def test_temporary_memory_grows_with_the_piece_and_not_with_the_batch(tail):
    def bytes_for(rows, size):
        return compiled(loss_fn, rows + tail, size, width=512).memory_analysis().temp_size_in_bytes

    few, many, large = bytes_for(64, 16), bytes_for(64 * 16, 16), bytes_for(64 * 16, 256)
    assert many <= 1.05 * few
    assert large > 2 * many


def test_the_unsplit_batch_takes_more():
    """The negative control of the above: what `jax.value_and_grad` needs does grow with the batch."""

    def bytes_for(rows):
        args = make_params(), *make_batch(rows)
        return jax.jit(jax.value_and_grad(loss_fn)).lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert bytes_for(4096) > 10 * bytes_for(64)


def test_a_batch_that_is_sharded_stays_where_it_is():
    """Even without `data_axis`, equal pieces take rows from every device."""
    assert_same(
        jax.jit(value_and_grad(loss_fn, micro_batch_size=4))(make_params(), *make_batch(16)),
        jax.value_and_grad(loss_fn)(make_params(), *make_batch(16)),
    )


def test_it_is_pure_and_leaves_the_configuration_alone():
    before = jax.config.values.copy()
    value_and_grad(loss_fn, micro_batch_size=4)(make_params(), *make_batch())
    assert jax.config.values == before


def deep(params, x, y):
    for weight in params:
        x = jnp.tanh(x @ weight)
    return (x.sum(1) - y) ** 2


def by_hand(loss, pieces, **options):
    """The scan that one would write: sums in the carry, divided once."""

    def of_batch(params, x, y):
        def add_piece(sums, piece):
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params, *piece)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        cut = tuple(leaf.reshape(pieces, -1, *leaf.shape[1:]) for leaf in (x, y))
        return jax.tree.map(lambda total: total / pieces, jax.lax.scan(add_piece, zeros, cut, **options)[0])

    return of_batch


def training_step(of_batch, donated=(0,)):
    def step(params, x, y):
        loss, gradients = of_batch(params, x, y)
        return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, params, gradients), loss

    args = [jnp.ones((128, 128))] * 6, jnp.ones((64, 128)), jnp.ones(64)
    return jax.jit(step, donate_argnums=donated).lower(*args).compile()


def temporary(program):
    return program.memory_analysis().temp_size_in_bytes


def mean(*args):
    return deep(*args).mean()


@pytest.mark.parametrize("donated", [(0,), ()], ids=["weights donated", "nothing donated"])
@pytest.mark.parametrize("size", [1, 4], ids=lambda size: f"pieces of {size}")
@pytest.mark.parametrize("loss", [mean, lambda *args: Mean.of(deep(*args))], ids=["scalar", "Mean"])
def test_a_training_step_takes_what_the_scan_by_hand_takes(loss, size, donated):
    """In temporary memory and in matrix products."""
    ours = training_step(value_and_grad(loss, micro_batch_size=size), donated)
    hand = training_step(by_hand(mean, 64 // size), donated)
    assert temporary(ours) <= 1.02 * temporary(hand)
    assert products(ours) == products(hand) > 0


def test_two_pieces_at_a_time_take_more():
    """The negative control, and the reason why the scan is not unrolled."""
    one, two = (training_step(by_hand(mean, 16, unroll=unroll)) for unroll in (1, 2))
    assert temporary(two) > 1.02 * temporary(one)
    assert products(two) > products(one)
