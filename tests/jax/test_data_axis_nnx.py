"""Flax NNX over a mesh axis: one state for all devices, random numbers of each device's own."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from modules import loss_fn, make_net, plain, train
from problems import assert_same, make_batch

from wholebatch.jax import collectives
from wholebatch.jax.nnx import value_and_grad

ROWS, DEVICES = 24, 4


def make_mesh(types=AxisType.Auto):
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(types,))


def shifted():
    """Rows with another mean in each piece of each device."""
    x, y = make_batch(ROWS)
    return x + 3 * jnp.arange(float(ROWS))[:, None], y


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name)
def test_training_with_an_optimizer_is_that_of_whole_batches(types):
    batches = [make_batch(ROWS, seed=i) for i in range(5)]
    with jax.set_mesh(make_mesh(types)):
        split = train(value_and_grad(loss_fn, micro_batch_size=8, data_axis="data"), batches)
    assert_same(split, train(nnx.value_and_grad(loss_fn), batches), tolerance=1e-10)


def test_statistics_that_are_not_written_cost_nothing_on_the_wire():
    model, twin, mesh, batch = make_net(norm=True), make_net(norm=True), make_mesh(), shifted()
    model.eval()
    twin.eval()
    step = nnx.jit(value_and_grad(loss_fn, micro_batch_size=8, data_axis="data", mesh=mesh))
    split, whole = step(model, *batch), nnx.value_and_grad(loss_fn)(twin, *batch)
    assert_same((split[0], plain(split[1])), (whole[0], plain(whole[1])))
    assert_same(plain(nnx.state(model, nnx.BatchStat)), plain(nnx.state(twin, nnx.BatchStat)))
    sharded = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    found = collectives(step.lower(model, *sharded).compile())
    assert not found.inside
    assert found.outside == {"all-reduce": 1}


def test_batch_norm_in_training_mode_is_refused_even_where_a_device_has_one_piece():
    with pytest.raises(ValueError, match='norm: in training mode.*batch_norm="micro"'):
        value_and_grad(loss_fn, data_axis="data", mesh=make_mesh())(make_net(norm=True), *shifted())


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize(
    "cut", [{}, {"micro_batch_size": 8}, {"micro_batch_size": 16}], ids=["one piece", "even", "tail"]
)
def test_batch_norm_by_micro_batch_has_the_statistics_of_the_rows_of_all_devices(cut, momentum):
    model, twin = make_net(norm=True, momentum=momentum), make_net(norm=True, momentum=momentum)
    step = value_and_grad(loss_fn, batch_norm="micro", data_axis="data", mesh=make_mesh(), **cut)
    with pytest.warns(UserWarning, match="norm: normalised by the statistics of each piece"):
        step(model, *shifted())
    nnx.value_and_grad(loss_fn)(twin, *shifted())
    assert_same(plain(nnx.state(model, nnx.BatchStat)), plain(nnx.state(twin, nnx.BatchStat)))


def test_the_statistics_of_one_device_fail_the_same_comparison():
    one, twin, (x, y) = make_net(norm=True), make_net(norm=True), shifted()
    nnx.value_and_grad(loss_fn)(one, x[:6], y[:6])
    nnx.value_and_grad(loss_fn)(twin, x, y)
    with pytest.raises(AssertionError, match="is off by"):
        assert_same(plain(nnx.state(one, nnx.BatchStat)), plain(nnx.state(twin, nnx.BatchStat)))


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name)
@pytest.mark.parametrize("pieces", [1, 3])
def test_every_device_drops_out_by_a_key_of_its_own_and_counts_on(pieces, types):
    class Drawing(nnx.Module):
        def __init__(self):
            self.w, self.rngs = nnx.Param(jnp.ones(())), nnx.Rngs(7)

        def __call__(self, x):
            return (self.w[...] * x).mean(), jax.random.uniform(self.rngs.noise())

    model = Drawing()
    keys = jax.random.key_data(model.rngs.default.key[...])
    with jax.set_mesh(make_mesh(types)):
        step = value_and_grad(lambda m, x: m(x), has_aux=True, num_micro_batches=pieces, aux="stack", data_axis="data")
        (_, drawn), _ = nnx.jit(step)(model, jnp.ones(12))
    assert len(set(drawn.tolist())) == DEVICES * pieces
    twin = Drawing()
    stream = twin.rngs.default
    stream.key[...] = jax.random.fold_in(stream.key[...], 2)
    expected = [twin(jnp.ones(1))[1] for _ in range(pieces)]
    assert np.asarray(drawn)[2 * pieces : 3 * pieces].tolist() == expected
    assert model.rngs.default.count[...] == pieces
    assert (jax.random.key_data(model.rngs.default.key[...]) == keys).all()


def test_layers_in_a_loop_have_streams_of_their_own_on_every_device():
    class Layers(nnx.Module):
        def __init__(self):
            @nnx.split_rngs(splits=3)
            @nnx.vmap
            def make(rngs):
                return nnx.Dropout(0.5, rngs=rngs)

            self.w, self.layers = nnx.Param(jnp.ones(())), make(nnx.Rngs(0))

        def __call__(self, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def one_after_another(layer, x):
                return layer(x)

            return one_after_another(self.layers, self.w[...] * x)

    model = Layers()
    before = model.layers.rngs.count[...]
    step = value_and_grad(lambda m, x: (m(x).mean(), m(x)), has_aux=True, data_axis="data", mesh=make_mesh())
    (_, kept), _ = nnx.jit(step)(model, jnp.ones((8, 64)))
    assert len({tuple(row) for row in np.asarray(kept).tolist()}) == 8
    assert (model.layers.rngs.count[...] == before + 2).all()


def test_dropout_without_keys_of_its_own_would_draw_alike():
    """The negative control: what a key in a closure does."""
    key = jax.random.key(0)

    def fun(model, x):
        return jnp.mean(model.hidden(x)), jax.random.uniform(key)

    step = value_and_grad(fun, has_aux=True, aux="stack", data_axis="data", mesh=make_mesh())
    (_, drawn), _ = step(make_net(), jnp.ones((12, 3)))
    assert len(set(drawn.tolist())) == 1


class Keeping(nnx.Module):
    """Keeps something of what it sees."""

    def __init__(self, keep):
        self.w, self.kept, self.calls = (
            nnx.Param(jnp.ones(())),
            nnx.Cache(jnp.zeros(())),
            nnx.Variable(jnp.zeros((), int)),
        )
        self.keep, self.rngs = keep, nnx.Rngs(0)

    def __call__(self, x):
        def layer(carry, _):
            jax.debug.callback(lambda seen: None, x.sum())  # as jax.debug.print does: nothing depends on it
            return (carry[0] * x.mean(), carry[1] + 1), None

        self.kept[...] = self.keep(self, x)
        (value, calls), _ = jax.lax.scan(layer, (self.w[...], self.calls[...]), None, length=2)
        self.calls[...] = calls
        return value


@pytest.mark.parametrize(
    "keep",
    [lambda m, x: x.sum(), lambda m, x: jax.random.uniform(m.rngs()), lambda m, x: m.kept[...] + x[0]],
    ids=["rows", "a key", "what is kept already"],
)
def test_state_that_would_differ_between_devices_is_refused_by_name(keep):
    step = value_and_grad(lambda m, x: m(x), micro_batch_size=4, data_axis="data", mesh=make_mesh())
    with pytest.raises(ValueError, match=r"depend on the rows or the random keys that a device has \(kept\)"):
        step(Keeping(keep), jnp.ones(8))


def test_state_that_is_the_same_everywhere_is_handed_on():
    """Even where a loop computes it together with what depends on the rows."""
    model = Keeping(lambda m, x: m.kept[...] + m.w[...])
    loss, _ = value_and_grad(lambda m, x: m(x), micro_batch_size=4, data_axis="data", mesh=make_mesh())(
        model, jnp.ones(8)
    )
    assert loss == 1
    assert model.kept[...] == 2
    assert model.calls[...] == 2 * 2


def test_a_stream_that_is_reseeded_inside_the_loss_is_refused():
    class Reseeding(nnx.Module):
        def __init__(self):
            self.w, self.rngs = nnx.Param(jnp.ones(())), nnx.Rngs(0)

        def __call__(self, x):
            self.rngs.default.key[...] = self.rngs()
            return self.w[...] * x.mean()

    with pytest.raises(
        ValueError, match=r"depend on the rows or the random keys that a device has \(rngs.default.key\)"
    ):
        value_and_grad(lambda m, x: m(x), data_axis="data", mesh=make_mesh())(Reseeding(), jnp.ones(8))


def test_options_are_refused_as_without_modules():
    with pytest.raises(TypeError, match="mesh must be a jax.sharding.Mesh, got int"):
        value_and_grad(loss_fn, data_axis="data", mesh=8)
    with pytest.raises(
        ValueError, match="the batch has 22 rows, which the 4 devices along 'data' cannot share equally"
    ):
        value_and_grad(loss_fn, data_axis="data", mesh=make_mesh())(make_net(), np.ones((22, 3)), np.ones(22))
