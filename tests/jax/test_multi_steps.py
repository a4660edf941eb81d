"""`multi_steps`: one step of the inner optimizer per window, from micro-batches that arrive one by one."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import numpy as jnp
from problems import assert_same, loss_fn, make_batch, make_params

from wholebatch.jax import multi_steps


def pieces_of(sizes, seed=1):
    x, y = make_batch(sum(sizes), seed)
    stops = np.cumsum(sizes)
    return [(x[stop - size : stop], y[stop - size : stop]) for size, stop in zip(sizes, stops, strict=True)]


def run(optimizer, windows, params, finish=False, poison=None):
    """Every micro-batch of every window through `update`; the weights after each call, and the state."""
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    seen = []
    for i, (x, y) in enumerate(piece for window in windows for piece in window):
        grads = jax.grad(loss_fn)(params, x, y)
        if i == poison:
            grads = jax.tree.map(lambda g: g * jnp.nan, grads)
        updates, state = update(grads, state, params, count=len(y))
        params = optax.apply_updates(params, updates)
        seen.append(params)
    if finish:
        updates, state = jax.jit(optimizer.finish)(state, params)
        params = optax.apply_updates(params, updates)
        seen.append(params)
    return seen, state


def whole_batches(inner, batches, params):
    state = inner.init(params)
    for x, y in batches:
        updates, state = inner.update(jax.grad(loss_fn)(params, x, y), state, params)
        params = optax.apply_updates(params, updates)
    return params


def joined(window):
    return tuple(jnp.concatenate(parts) for parts in zip(*window, strict=True))


SIZES = [[4, 4, 2], [1, 5, 4], [3, 3, 3]]


@pytest.mark.parametrize(
    "inner",
    [optax.sgd(0.1), optax.adam(1e-2), optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))],
    ids=["sgd", "adam", "clip and adamw"],
)
def test_windows_of_unequal_pieces_are_whole_batches(inner):
    windows = [pieces_of(sizes, seed) for seed, sizes in enumerate(SIZES)]
    seen, state = run(multi_steps(inner, 3), windows, make_params())
    assert_same(seen[-1], whole_batches(inner, map(joined, windows), make_params()), tolerance=1e-11)
    assert state.micro_step == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(state.gradients))


def test_weights_move_at_window_ends_only():
    seen, _ = run(multi_steps(optax.sgd(0.1), 3), [pieces_of([2] * 6)], make_params())
    moved = [bool((a["out"] != b["out"]).any()) for a, b in zip([make_params(), *seen], seen, strict=False)]
    assert moved == [False, False, True, False, False, True]


def test_a_short_last_window_is_flushed():
    windows = [pieces_of([4, 4, 2]), pieces_of([3, 1], seed=5)]
    optimizer = multi_steps(optax.adam(1e-2), 3)
    seen, _ = run(optimizer, windows, make_params(), finish=True)
    assert_same(seen[-1], whole_batches(optax.adam(1e-2), map(joined, windows), make_params()), tolerance=1e-11)


def test_finishing_with_nothing_pending_does_nothing():
    seen, state = run(multi_steps(optax.adam(1e-2), 3), [pieces_of([4, 4, 2])], make_params(), finish=True)
    assert_same(seen[-1], seen[-2])
    assert state.skipped == 0
    assert state.inner[0].count == 1


def test_a_nan_does_not_outlive_its_window():
    windows = [pieces_of([4, 4, 2], seed) for seed in range(3)]
    seen, state = run(multi_steps(optax.adam(1e-2), 3), windows, make_params(), poison=1)
    kept = whole_batches(optax.adam(1e-2), map(joined, windows[1:]), make_params())
    assert_same(seen[-1], kept, tolerance=1e-11)
    assert state.skipped == 1


def test_optaxs_multi_steps_is_poisoned_for_good():
    """The negative control."""
    windows = [pieces_of([4, 4, 2], seed) for seed in range(3)]
    optimizer = optax.MultiSteps(optax.adam(1e-2), 3).gradient_transformation()
    params = make_params()
    state = optimizer.init(params)
    for i, (x, y) in enumerate(piece for window in windows for piece in window):
        grads = jax.tree.map(lambda g, i=i: g * (jnp.nan if i == 1 else 1), jax.grad(loss_fn)(params, x, y))
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert not np.isfinite(params["out"]).any()


def test_optaxs_multi_steps_weights_unequal_pieces_alike():
    """The negative control of the first test."""
    window = pieces_of([1, 5, 4])
    optimizer = optax.MultiSteps(optax.sgd(0.1), 3).gradient_transformation()
    params = make_params()
    state = optimizer.init(params)
    for x, y in window:
        updates, state = optimizer.update(jax.grad(loss_fn)(make_params(), x, y), state, params)
        params = optax.apply_updates(params, updates)
    with pytest.raises(AssertionError, match="is off by"):
        assert_same(params, whole_batches(optax.sgd(0.1), [joined(window)], make_params()), tolerance=1e-11)


def spying():
    """An optimizer that says when it runs."""
    runs = []

    def update(updates, state, params=None):
        jax.debug.callback(lambda: runs.append(1))
        return updates, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update), runs


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [(multi_steps, 2), (lambda inner, every: optax.MultiSteps(inner, every).gradient_transformation(), 6)],
    ids=["ours", "optax's, the negative control"],
)
def test_the_inner_optimizer_runs_once_per_window(wrap, expected):
    inner, runs = spying()
    optimizer = wrap(inner, 3)
    params, grads = make_params(), make_params()
    state = optimizer.init(params)
    for _ in range(6):
        _, state = jax.jit(optimizer.update)(grads, state, params)
    jax.effects_barrier()
    assert len(runs) == expected


def test_what_counts_nothing_adds_nothing():
    optimizer = multi_steps(optax.sgd(1.0), 2)
    params = jnp.zeros(2)
    _, state = optimizer.update(jnp.full(2, jnp.nan), optimizer.init(params), params, count=0)
    updates, state = optimizer.update(jnp.ones(2), state, params, count=3)
    assert updates.tolist() == [-1, -1]
    for _ in range(2):
        updates, state = optimizer.update(jnp.ones(2), state, params, count=jnp.asarray(0))
    assert updates.tolist() == [0, 0]
    assert state.skipped == 1


def test_the_count_may_be_given_by_position():
    optimizer = multi_steps(optax.sgd(1.0), 2)
    params = jnp.zeros(2)
    _, state = optimizer.update(jnp.ones(2), optimizer.init(params), params, 3)
    updates, _ = optimizer.update(jnp.full(2, 5.0), state, params, 1)
    assert updates.tolist() == [-2, -2]


def test_it_may_be_the_body_of_a_scan():
    """The state has the same types after each call; windows of 3 in 7 calls leave one open."""
    optimizer = multi_steps(optax.sgd(1.0), 3)
    params = {"w": jnp.zeros(3), "b": jnp.zeros((), jnp.bfloat16)}

    def body(carry, grads):
        params, state = carry
        updates, state = optimizer.update(grads, state, params, count=jnp.int32(2))
        return (optax.apply_updates(params, updates), state), None

    grads = jax.tree.map(lambda p: jnp.ones((7, *p.shape), p.dtype), params)
    (params, state), _ = jax.lax.scan(body, (params, optimizer.init(params)), grads)
    assert (params["w"].tolist(), float(params["b"]), int(state.micro_step)) == ([-2] * 3, -2, 1)


def test_16_bit_gradients_are_summed_in_float32():
    optimizer = multi_steps(optax.sgd(1.0), 1000)
    params = jnp.zeros((), jnp.bfloat16)
    update = jax.jit(optimizer.update)
    state = optimizer.init(params)
    assert state.gradients.dtype == jnp.float32
    for _ in range(1000):
        updates, state = update(jnp.ones((), jnp.bfloat16), state, params)
    assert updates == -1
    assert updates.dtype == jnp.bfloat16


def test_in_a_train_state():
    params = make_params()
    state = TrainState.create(apply_fn=None, params=params, tx=multi_steps(optax.sgd(0.1), 2))
    for x, y in pieces_of([5, 5]):
        state = state.apply_gradients(grads=jax.grad(loss_fn)(params, x, y))
    assert_same(state.params, whole_batches(optax.sgd(0.1), [make_batch()], params), tolerance=1e-11)


def test_in_an_nnx_optimizer():
    model = nnx.Linear(3, 1, param_dtype=float, rngs=nnx.Rngs(0))
    twin = nnx.Linear(3, 1, param_dtype=float, rngs=nnx.Rngs(0))

    def loss_fn(model, x, y):
        return jnp.mean((model(x)[:, 0] - y) ** 2)

    optimizer = nnx.Optimizer(model, multi_steps(optax.adam(1e-2), 2), wrt=nnx.Param)
    whole = nnx.Optimizer(twin, optax.adam(1e-2), wrt=nnx.Param)
    for x, y in pieces_of([5, 5]):
        optimizer.update(model, nnx.grad(loss_fn)(model, x, y))
    whole.update(twin, nnx.grad(loss_fn)(twin, *make_batch()))
    assert_same(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(twin)), tolerance=1e-11)


@pytest.mark.parametrize("every", [0, -1, 2.5, "4"])
def test_windows_that_cannot_be_meant(every):
    with pytest.raises(ValueError, match="every must be"):
        multi_steps(optax.sgd(0.1), every)


def test_counts_that_cannot_be_meant():
    optimizer = multi_steps(optax.sgd(0.1), 2)
    with pytest.raises(ValueError, match="the count of a micro-batch must be finite and not negative, got -1"):
        optimizer.update(jnp.ones(2), optimizer.init(jnp.zeros(2)), jnp.zeros(2), count=-1)
