"""Rows sharded over a mesh axis: local sums on each device, each gradient on the wire once, and the batch never."""

import re
import warnings
from collections import Counter

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from problems import assert_same, assert_same_types, loss_fn, make_batch, make_params, predict, squares

from wholebatch import Mean, Sum, WholeBatchError
from wholebatch.jax import collectives, grad, value_and_grad

TYPES = [AxisType.Auto, AxisType.Explicit]
CUTS = {"pieces": {"micro_batch_size": 16}, "one piece": {}, "a remainder": {"micro_batch_size": 32}}
ROWS = 48


def make_mesh(shape=(8,), names=("data",), types=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=types if isinstance(types, tuple) else (types,) * len(names))


def over_rows(mesh, batch):
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))


def on_all(mesh, params):
    return jax.device_put(params, NamedSharding(mesh, PartitionSpec()))


def tokens(params, x, y):
    return Mean.of(squares(params, x, y), where=y > 0)


def several(params, x, y):
    losses = squares(params, x, y)
    return {"a": Mean.of(losses, where=y > 0), "b": 0.3 * Mean.of(losses, where=x[:, 0] > 0), "c": losses.mean()}


def plainly(fun):
    """The objective of the unsplit batch, for JAX's own gradient."""

    def objective(*args):
        returned = fun(*args)
        terms = returned.values() if isinstance(returned, dict) else [returned]
        return sum(term.value if isinstance(term, Mean | Sum) else term for term in terms)

    return objective


LOSSES = {"scalar": loss_fn, "tokens": tokens, "several": several}


@pytest.mark.parametrize(
    ("types", "cut"), [*((AxisType.Auto, cut) for cut in CUTS), (AxisType.Explicit, "a remainder")], ids=str
)
@pytest.mark.parametrize("fun", LOSSES.values(), ids=LOSSES)
def test_every_gradient_is_sent_once_and_no_row_is(fun, cut, types):
    mesh, params, batch = make_mesh(types=types), make_params(), make_batch(ROWS)
    with jax.set_mesh(mesh):
        args = on_all(mesh, params), *over_rows(mesh, batch)
        program = jax.jit(value_and_grad(fun, data_axis="data", **CUTS[cut])).lower(*args).compile()
        split = program(*args)
    assert_same(split, jax.value_and_grad(plainly(fun))(params, *batch))
    found = collectives(program)
    assert not found.inside
    sent = 1 if fun is loss_fn else 2  # counts are integers, or needed before
    assert found.outside == {"all-reduce": sent}


def test_automatic_sharding_sends_gradients_for_every_piece():
    """The negative control of the counts: the same gradient, without `data_axis`."""
    mesh, params, batch = make_mesh(), make_params(), make_batch(ROWS)
    with jax.set_mesh(mesh):
        args = on_all(mesh, params), *over_rows(mesh, batch)
        program = jax.jit(value_and_grad(loss_fn, micro_batch_size=16)).lower(*args).compile()
        assert_same(program(*args), jax.value_and_grad(loss_fn)(params, *batch))
    assert collectives(program).inside["all-reduce"] > 0


def test_gradients_of_a_local_mean_come_back_summed_where_parameters_are_not_marked_as_varying():
    """The negative control of the sums: what JAX's types make of the same program, unless one knows."""
    mesh, params, batch = make_mesh(), make_params(), make_batch(ROWS)

    def step(vary):
        def local(params, x, y):
            if vary:
                params = jax.tree.map(lambda leaf: lax.pcast(leaf, ("data",), to="varying"), params)
            return lax.pmean(jax.grad(loss_fn)(params, x, y), "data")

        specs = PartitionSpec(), PartitionSpec("data"), PartitionSpec("data")
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))

    whole = jax.grad(loss_fn)(params, *batch)
    assert_same(step(vary=True)(params, *batch), whole)
    with pytest.raises(AssertionError, match="is off by"):
        assert_same(step(vary=False)(params, *batch), whole)
    assert_same(step(vary=False)(params, *batch), jax.tree.map(lambda leaf: 8 * leaf, whole))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_any_number_of_devices(devices):
    mesh, params, batch = make_mesh((devices,)), make_params(), make_batch(ROWS)
    step = jax.jit(value_and_grad(tokens, data_axis="data", mesh=mesh, num_micro_batches=6))
    assert_same(step(params, *batch), jax.value_and_grad(plainly(tokens))(params, *batch))


@pytest.mark.parametrize("fun", [tokens, several], ids=["one term", "several"])
def test_devices_that_count_nothing_add_nothing_and_devices_may_count_unequally(fun):
    x, y = make_batch(ROWS)
    y = jnp.where(jnp.arange(ROWS) < 12, -jnp.abs(y), y)  # two devices of eight
    step = jax.jit(value_and_grad(fun, data_axis="data", mesh=make_mesh(), micro_batch_size=16))
    assert_same(step(make_params(), x, y), jax.value_and_grad(plainly(fun))(make_params(), x, y))
    loss, grads = step(make_params(), -jnp.abs(x), -jnp.abs(y))
    if fun is tokens:
        assert loss == 0
        assert not any(leaf.any() for leaf in jax.tree.leaves(grads))
    assert np.isfinite(loss)


def test_the_mean_of_the_devices_means_fails_the_same_comparison():
    params, (x, y) = make_params(), make_batch(ROWS)
    means = [jax.grad(plainly(tokens))(params, x[i : i + 6], y[i : i + 6]) for i in range(0, ROWS, 6)]
    with pytest.raises(AssertionError, match="is off by"):
        assert_same(jax.tree.map(lambda *parts: sum(parts) / 8, *means), jax.grad(plainly(tokens))(params, x, y))


def with_model_axis(mesh, params, spec):
    specs = {"in": {"w": PartitionSpec(None, spec), "b": PartitionSpec(spec)}, "out": PartitionSpec(spec)}
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), params, specs)


def predict_explicitly(params, x, y):
    """Where axes are explicit, a contraction of what is sharded says what becomes of it."""
    hidden = jnp.tanh(x @ params["in"]["w"] + params["in"]["b"])
    return jnp.mean((jnp.einsum("nh,h->n", hidden, params["out"], out_sharding=PartitionSpec(None)) - y) ** 2)


@pytest.mark.parametrize("model", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("data", TYPES, ids=lambda t: t.name)
def test_data_and_tensor_parallel(data, model):
    """Tensor parallelism keeps its own collective, in each piece; gradients cross the data axis once."""
    mesh, params, batch = make_mesh((4, 2), ("data", "model"), (data, model)), make_params(), make_batch(ROWS)
    fun = predict_explicitly if model is AxisType.Explicit else loss_fn
    with jax.set_mesh(mesh):
        args = with_model_axis(mesh, params, "model"), *over_rows(mesh, batch)
        step = jax.jit(value_and_grad(fun, data_axis="data", micro_batch_size=16))
        program = step.lower(*args).compile()
        split = program(*args)
    assert_same(split, jax.value_and_grad(loss_fn)(params, *batch))
    assert split[1]["in"]["w"].sharding.spec == PartitionSpec(None, "model")
    found = collectives(program)
    assert found.inside == {"all-reduce": 1}
    assert found.outside == {"all-reduce": 1}
    groups = re.findall(r" all-reduce\(.*replica_groups=(\S+),", program.as_text())
    assert sum(group in ("{{0,2,4,6},{1,3,5,7}}", "[2,4]<=[4,2]T(1,0)") for group in groups) == 1
    assert sum(group in ("{{0,1},{2,3},{4,5},{6,7}}", "[4,2]<=[8]") for group in groups) == 1


@pytest.mark.parametrize("types", TYPES, ids=lambda t: t.name)
def test_parameters_that_are_sharded_over_the_data_axis_are_gathered_once(types):
    mesh, params, batch = make_mesh(types=types), make_params(), make_batch(ROWS)
    with jax.set_mesh(mesh):
        args = with_model_axis(mesh, params, "data"), *over_rows(mesh, batch)
        program = jax.jit(value_and_grad(loss_fn, data_axis="data", micro_batch_size=16)).lower(*args).compile()
        split = program(*args)
    assert_same(split, jax.value_and_grad(loss_fn)(params, *batch))
    found = collectives(program)
    assert not found.inside
    assert found.outside == {"all-gather": len(jax.tree.leaves(params)), "all-reduce": 1}
    if types is AxisType.Explicit:  # where it is part of the type, as JAX's own gradient has it
        assert split[1]["in"]["w"].sharding.spec == PartitionSpec(None, "data")


def test_several_axes_may_share_the_rows():
    mesh, params, batch = make_mesh((2, 4), ("slice", "data")), make_params(), make_batch(ROWS)
    step = jax.jit(value_and_grad(tokens, data_axis=("slice", "data"), mesh=mesh, micro_batch_size=16))
    assert_same(step(params, *batch), jax.value_and_grad(plainly(tokens))(params, *batch))
    assert collectives(step.lower(params, *batch).compile()).inside.total() == 0


def test_the_loss_may_hold_loops_of_its_own():
    """Whose carries begin as plain zeros, as in any recurrent layer: it needs to know nothing of devices."""

    def recurrent(params, x, y):
        def cell(hidden, _):
            return jnp.tanh(hidden + x @ params["in"]["w"]), None

        hidden, _ = lax.scan(cell, jnp.zeros((len(x), 8)), None, length=3)
        return jnp.mean((hidden @ params["out"] - y) ** 2)

    params, batch = make_params(), make_batch(ROWS)
    split = value_and_grad(recurrent, data_axis="data", mesh=make_mesh(), micro_batch_size=16)(params, *batch)
    assert_same(split, jax.value_and_grad(recurrent)(params, *batch))


def test_other_arguments_go_whole_to_each_device():
    mesh, (x, y) = make_mesh(types=AxisType.Explicit), make_batch(ROWS)

    def fun(params, frozen, x, options, *, scale):
        return jnp.mean((x["x"] @ frozen["w"] * params * x["power"] - x["y"]) ** 2) * scale[0] * options

    with jax.set_mesh(mesh):
        frozen = on_all(mesh, {"w": jnp.arange(3.0)})
        batch = {"x": over_rows(mesh, x), "y": over_rows(mesh, y), "power": on_all(mesh, jnp.asarray(2.0))}
        args = jnp.asarray(1.5), frozen, batch, 3
        options = {"micro_batch_size": 16, "batch_argnums": 2, "data_axis": "data"}
        split = jax.jit(value_and_grad(fun, **options))(*args, scale=on_all(mesh, jnp.ones(1)))
        whole = jax.value_and_grad(fun)(*args, scale=jnp.ones(1))
    assert_same(split, whole)


@pytest.mark.parametrize("types", TYPES, ids=lambda t: t.name)
def test_the_mesh_may_be_given_and_the_batch_lie_anywhere(types):
    """Under `vmap` too, and beside a mesh axis that nothing uses."""
    mesh, params, batch = make_mesh((4, 2), ("data", "model"), types), make_params(), make_batch(ROWS)
    step = value_and_grad(loss_fn, data_axis="data", mesh=mesh, micro_batch_size=16)
    two = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params)
    split = jax.jit(jax.vmap(step, in_axes=(0, None, None)))(two, *batch)
    assert_same(jax.tree.map(lambda leaf: np.asarray(leaf)[1], split), jax.value_and_grad(loss_fn)(params, *batch))


def test_other_axes_may_be_manual():
    """Called inside a `jax.shard_map` over the model axis."""
    mesh, params, batch = make_mesh((4, 2), ("data", "model")), make_params(), make_batch(ROWS)

    def body(_):
        return jax.tree.map(
            lambda leaf: leaf[None], value_and_grad(loss_fn, data_axis="data", micro_batch_size=16)(params, *batch)
        )

    over_model = PartitionSpec("model")
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=over_model, out_specs=over_model, axis_names={"model"}, check_vma=False
    )
    split = jax.tree.map(lambda leaf: leaf[0], jax.jit(mapped)(jnp.ones(2)))
    assert_same(split, jax.value_and_grad(loss_fn)(params, *batch))


def test_it_can_be_differentiated_and_called_eagerly():
    mesh, params, batch = make_mesh((4, 2), ("data", "model")), make_params(), make_batch(ROWS)
    norm = lambda gradient: lambda p: sum((leaf**2).sum() for leaf in jax.tree.leaves(gradient(p, *batch)))  # noqa: E731
    split = jax.grad(norm(grad(tokens, data_axis="data", mesh=mesh, micro_batch_size=16)))(params)
    assert_same(split, jax.jit(jax.grad(norm(jax.grad(plainly(tokens)))))(params))


def test_types_are_those_of_jax():
    mesh, args = make_mesh(), (make_params(dtype=jnp.bfloat16), *make_batch(ROWS, dtype=jnp.bfloat16))
    split = value_and_grad(loss_fn, data_axis="data", mesh=mesh, micro_batch_size=16)(*args)
    assert_same_types(split, jax.value_and_grad(loss_fn)(*args))


def test_16_bit_gradients_are_summed_over_devices_in_float32():
    """In bfloat16, 7 devices with 1/512 each do not move the 1 of the eighth."""
    w, x = jnp.ones((), jnp.bfloat16), jnp.asarray([1.0] + [2.0**-9] * 7, jnp.bfloat16)
    split = grad(lambda w, x: Sum((w * x).sum()), data_axis="data", mesh=make_mesh())
    assert split(w, x) == jnp.asarray(1 + 7 * 2.0**-9, jnp.bfloat16) != 1
    rounded = grad(lambda w, x: Sum((w * x).sum()), data_axis="data", mesh=make_mesh(), accum_dtype=jnp.float32)(w, x)
    assert rounded == 1 + 7 * 2.0**-9


def test_token_sums_do_not_overflow_float16():
    w, x = jnp.asarray(2.0, jnp.float16), jnp.full(64, 60, jnp.float16)

    def fun(w, x):
        return Mean(1000 * (w * x).astype(jnp.float32).sum(), 1000 * len(x))

    grads = jax.jit(grad(fun, data_axis="data", mesh=make_mesh(), micro_batch_size=16))(w, x)
    assert np.isclose(grads, 60, rtol=2e-3)


# What is reported besides


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_aux_is_that_of_the_whole_batch(cut):
    def fun(params, x, y):
        losses = squares(params, x, y)
        reported = {
            "rows": losses,
            "right": (losses < 1).sum(),
            "mean": losses.mean(),
            "masked": Mean.of(losses, where=y > 0),
            "sum": Sum(losses.sum()),
        }
        return losses.mean(), reported

    params, batch = make_params(), make_batch(ROWS)
    step = jax.jit(value_and_grad(fun, has_aux=True, return_terms=True, data_axis="data", mesh=make_mesh(), **cut))
    (value, aux), _ = step(params, *batch)
    expected = fun(params, *batch)
    reported = {name: getattr(leaf, "value", leaf) for name, leaf in expected[1].items()}
    assert_same(aux, reported)
    assert_same(value, (expected[0], {"loss": expected[0]}))


def test_averages_are_weighted_by_the_counts_of_all_devices():
    def fun(params, x, y):
        kept = y > 0
        losses = jnp.where(kept, squares(params, x, y), 0)
        return Mean(losses.sum(), kept.sum()), losses.sum() / jnp.maximum(kept.sum(), 1)

    params, (x, y) = make_params(), make_batch(ROWS)
    (_, mean), _ = value_and_grad(fun, has_aux=True, data_axis="data", mesh=make_mesh())(params, x, y)
    assert np.isclose(mean, squares(params, x, y)[y > 0].mean(), rtol=1e-12)


def test_what_is_stacked_has_an_entry_for_each_piece_of_each_device():
    def fun(params, x, y):
        return loss_fn(params, x, y), {"first": y.min(), "pair": jnp.stack([y.min(), y.max()])}

    y = jnp.arange(float(ROWS))
    options = {"aux": {"first": "stack", "pair": "concat"}, "data_axis": "data", "mesh": make_mesh((4,))}
    step = value_and_grad(fun, has_aux=True, micro_batch_size=20, **options)  # 5 + 5 + 2 of 12 rows
    (_, aux), _ = step(make_params(), jnp.ones((ROWS, 3)), y)
    assert aux["first"].tolist() == [0, 5, 10, 12, 17, 22, 24, 29, 34, 36, 41, 46]
    assert aux["pair"].shape == (2 * 4 * 3,)


# Random keys


KEYS = {"typed": jax.random.key(3), "raw": jax.random.PRNGKey(3)}


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_each_piece_of_each_device_has_a_key_of_its_own(key, pieces):
    def fun(params, key, x):
        return (params * x).mean(), jax.random.uniform(key)

    options = {"aux": "stack", "rng_argnums": 1, "has_aux": True, "data_axis": "data", "mesh": make_mesh((4,))}
    (_, drawn), _ = value_and_grad(fun, num_micro_batches=pieces, **options)(jnp.ones(()), key, jnp.ones(12))
    keys = jax.random.split(key, pieces) if pieces > 1 else key[None]
    expected = [jax.random.uniform(jax.random.fold_in(key, device)) for device in range(4) for key in keys]
    assert drawn.tolist() == expected
    assert len(set(drawn.tolist())) == 4 * pieces


# Bad input


X, Y = np.ones((ROWS, 3)), np.ones(ROWS)


def run(rows=ROWS, fun=loss_fn, **options):
    return value_and_grad(fun, **({"data_axis": "data"} | options))(make_params(), X[:rows], Y[:rows])


def inside_a_shard_map():
    def local(x):
        return run(mesh=None) and x

    specs = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec("data")}
    return jax.jit(jax.shard_map(local, mesh=make_mesh(), **specs))(jnp.ones(8))


def under_another_mesh():
    with jax.set_mesh(make_mesh((4, 2), ("data", "model"))):
        run(mesh=make_mesh())


CALLS = [
    (lambda: run(), "data_axis='data' names an axis of a mesh, but there is no mesh: call this under jax.set_mesh"),
    (lambda: run(mesh=make_mesh(names=("x",))), "data_axis='data' is not an axis of the mesh, which has 'x'"),
    (
        lambda: run(mesh=make_mesh(), rows=42),
        "the batch has 42 rows, which the 8 devices along 'data' cannot share equally",
    ),
    (
        lambda: run(mesh=make_mesh(), micro_batch_size=12),
        "micro_batch_size=12 makes pieces of 12 rows, which the 8 devices along 'data' cannot share equally: .*multiple of 8",
    ),
    (
        lambda: run(mesh=make_mesh(), num_micro_batches=5),
        "num_micro_batches=5 makes pieces of 10 rows, which the 8 devices",
    ),
    (lambda: run(mesh=make_mesh(), data_axis=None), "mesh= was given without data_axis=: .* of 'data'"),
    (lambda: run(mesh=8), "mesh must be a jax.sharding.Mesh, got int"),
    (lambda: run(data_axis=0), "data_axis must be the name of a mesh axis, or several, got 0"),
    (lambda: run(data_axis=()), "data_axis must be the name of a mesh axis, or several, got \\(\\)"),
    (under_another_mesh, "mesh= has the axes data=8, but this is called under jax.set_mesh of data=4, model=2"),
    (inside_a_shard_map, "data_axis='data' is manual here, inside of a jax.shard_map over it"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_what_cannot_be_given_is_refused(call, message):
    with pytest.raises(WholeBatchError, match=message) as raised:
        call()
    assert isinstance(raised.value, ValueError | TypeError)


def test_rows_that_are_explicitly_sharded_over_another_axis_are_refused():
    mesh = make_mesh((4, 2), ("data", "model"), AxisType.Explicit)
    with jax.set_mesh(mesh):
        batch = jax.device_put(make_batch(ROWS), PartitionSpec("model"))
        with pytest.raises(ValueError, match="rows sharded over 'model', but data_axis='data': jax.reshard it"):
            jax.jit(value_and_grad(loss_fn, data_axis="data"))(make_params(), *batch)
        whole = on_all(mesh, make_batch(ROWS))  # every device has them, so none is moved
        step = jax.jit(value_and_grad(loss_fn, data_axis="data", micro_batch_size=16))
        assert_same(step(make_params(), *whole), jax.value_and_grad(loss_fn)(make_params(), *make_batch(ROWS)))
        assert not collectives(step.lower(make_params(), *whole).compile()).total - Counter({"all-reduce": 1})


def test_the_mesh_may_be_that_of_a_with_statement():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # JAX's, about the statement
        with make_mesh():
            split = run(micro_batch_size=16)
    assert_same(split, jax.value_and_grad(loss_fn)(make_params(), X, Y))


def test_a_batch_that_lies_elsewhere_is_sharded_first():
    """Where axes are automatic, the program takes arrays from anywhere; what is not sharded by rows is moved once."""
    mesh, params, (x, y) = make_mesh(), make_params(), make_batch(ROWS)
    with jax.set_mesh(mesh):
        step = jax.jit(value_and_grad(loss_fn, data_axis="data", micro_batch_size=16))
        assert_same(step(params, x, on_all(mesh, y)), jax.value_and_grad(loss_fn)(params, x, y))
    assert predict(params, x).shape == y.shape
