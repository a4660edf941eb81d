"""Flax NNX: modules in, states of gradients out, everything else updated in place."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import numpy as jnp
from modules import Net, loss_fn, make_net, plain, train
from problems import assert_same, make_batch

import wholebatch.jax
from wholebatch import Mean
from wholebatch.jax.nnx import value_and_grad

CUTS = [{}, {"micro_batch_size": 4}, {"micro_batch_size": 5}, {"num_micro_batches": 10}]


def test_the_front_end_is_reached_by_attribute():
    assert wholebatch.jax.nnx.value_and_grad is value_and_grad
    with pytest.raises(AttributeError, match="no attribute 'linnen'"):
        _ = wholebatch.jax.linnen


@pytest.mark.parametrize("jit", [nnx.jit, lambda f: f], ids=["under nnx.jit", "eagerly"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_gradients_are_those_of_nnx(cut, jit):
    model, batch = make_net(), make_batch()
    loss, grads = jit(value_and_grad(loss_fn, **cut))(model, *batch)
    whole_loss, whole = nnx.value_and_grad(loss_fn)(model, *batch)
    assert type(grads) is type(whole)
    assert jax.tree.structure(grads) == jax.tree.structure(whole)
    assert_same((loss, plain(grads)), (whole_loss, plain(whole)))


def test_training_with_an_optimizer_is_that_of_whole_batches():
    batches = [make_batch(seed=i) for i in range(10)]
    split = train(value_and_grad(loss_fn, micro_batch_size=4), batches)
    whole = train(nnx.value_and_grad(loss_fn), batches)
    assert_same(split, whole, tolerance=1e-10)
    start = plain(nnx.state(make_net(), nnx.Param))
    assert np.abs(split[1]["head"]["kernel"] - start["head"]["kernel"]).max() > 1e-2, "training moved the weights"


@pytest.mark.parametrize(
    "argnums",
    [nnx.DiffState(0, nnx.PathContains("head")), nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("hidden")))],
    ids=["head", "hidden"],
)
def test_filters_choose_what_is_differentiated(argnums):
    model, batch = make_net(), make_batch()
    split = value_and_grad(loss_fn, argnums=argnums, micro_batch_size=4)(model, *batch)
    whole = nnx.value_and_grad(loss_fn, argnums=argnums)(model, *batch)
    assert_same((split[0], plain(split[1])), (whole[0], plain(whole[1])))
    assert len(jax.tree.leaves(split[1])) == 2


def test_low_rank_adapters_alone_are_trained():
    model = nnx.LoRA(
        3, 2, 1, base_module=nnx.Linear(3, 1, param_dtype=float, rngs=nnx.Rngs(1)), param_dtype=float, rngs=nnx.Rngs(0)
    )
    model.lora_b[...] = jnp.ones_like(model.lora_b[...])

    def loss_fn(model, x, y):
        return jnp.mean((model(x)[:, 0] - y) ** 2)

    adapters = nnx.DiffState(0, nnx.LoRAParam)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)
    before = np.asarray(model.base_module.kernel[...])
    whole = nnx.value_and_grad(loss_fn, argnums=adapters)(model, *make_batch())
    loss, grads = value_and_grad(loss_fn, argnums=adapters, micro_batch_size=4)(model, *make_batch())
    assert_same((loss, plain(grads)), (whole[0], plain(whole[1])))
    optimizer.update(model, grads)
    assert (np.asarray(model.base_module.kernel[...]) == before).all()


def test_several_modules_that_share_one():
    class Head(nnx.Module):
        def __init__(self, body, rngs):
            self.body, self.out = body, nnx.Linear(8, 1, param_dtype=float, rngs=rngs)

    body = nnx.Linear(3, 8, param_dtype=float, rngs=nnx.Rngs(0))
    one, two = Head(body, nnx.Rngs(1)), Head(body, nnx.Rngs(2))

    def loss_fn(pair, x, y):
        hidden = jnp.tanh(pair["one"].body(x))
        return jnp.mean((pair["one"].out(hidden)[:, 0] + pair["two"].out(pair["two"].body(x))[:, 0] - y) ** 2)

    pair = {"one": one, "two": two}
    split = value_and_grad(loss_fn, micro_batch_size=4)(pair, *make_batch())
    whole = nnx.value_and_grad(loss_fn)(pair, *make_batch())
    assert_same(split, whole)


@pytest.mark.parametrize(
    "argnums", [0, nnx.DiffState(0, lambda path, variable: not path or "head" in path)], ids=["all", "heads"]
)
@pytest.mark.parametrize(
    "put",
    [
        lambda one, two: {"one": one, "two": two},
        lambda one, two: (one, two),
        lambda one, two: [{"deep": one}, two, jnp.asarray(2.0)],
        lambda one, two: {"one": one, "param": nnx.Param(jnp.asarray(2.0)), "array": jnp.asarray(3.0)},
    ],
    ids=["dict", "tuple", "array beside", "variable beside"],
)
def test_a_tree_of_modules_has_a_tree_of_gradients(put, argnums):
    def loss_fn(tree, x, y):
        leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Module))
        nets = [leaf(x) if isinstance(leaf, nnx.Module) else leaf * jnp.ones(len(x)) for leaf in leaves]
        return jnp.mean((jnp.prod(jnp.stack(nets), 0) - y) ** 2)

    tree, batch = put(make_net(), Net(rngs=nnx.Rngs(7))), make_batch()
    split = value_and_grad(loss_fn, argnums=argnums, micro_batch_size=4)(tree, *batch)
    whole = nnx.value_and_grad(loss_fn, argnums=argnums)(tree, *batch)
    assert_same(split, whole)


def test_arrays_beside_a_module_that_is_not_differentiated_are_given_as_they_are():
    def loss_fn(student, fixed, x, y, *, more):
        return jnp.mean((student(x) - fixed["scale"] * fixed["teacher"](x) - more["net"](x) * more["scale"] - y) ** 2)

    student, batch = make_net(), make_batch()
    fixed = {"teacher": Net(rngs=nnx.Rngs(7)), "scale": jnp.asarray(2.0)}
    more = {"net": Net(rngs=nnx.Rngs(8)), "scale": jnp.asarray(3.0)}
    split = value_and_grad(loss_fn, micro_batch_size=4)(student, fixed, *batch, more=more)
    whole = nnx.value_and_grad(functools.partial(loss_fn, more=more))(student, fixed, *batch)
    assert_same(split, whole)


def test_several_arguments_are_differentiated():
    teacher, student, (x, y) = make_net(), Net(rngs=nnx.Rngs(7)), make_batch()

    def loss_fn(student, scale, teacher, x, y):
        return jnp.mean((scale * student(x) - teacher(x) - y) ** 2)

    scale = jnp.asarray(2.0)
    split = value_and_grad(loss_fn, argnums=(0, 1), micro_batch_size=4)(student, scale, teacher, x, y)
    whole = nnx.value_and_grad(loss_fn, argnums=(0, 1))(student, scale, teacher, x, y)
    assert isinstance(split[1], tuple)
    assert_same((split[0], plain(split[1][0]), split[1][1]), (whole[0], plain(whole[1][0]), whole[1][1]))


@pytest.mark.parametrize(("cut", "pieces"), [({}, 1), ({"micro_batch_size": 4}, 3), ({"micro_batch_size": 5}, 2)])
def test_dropout_draws_anew_for_each_piece_and_counts_on(cut, pieces):
    model = make_net(rate=0.5)
    before = int(model.dropout.rngs.count[...])
    value_and_grad(loss_fn, **cut)(model, *make_batch())
    assert model.dropout.rngs.count[...] == before + pieces


def test_dropout_is_that_of_a_loop_over_the_same_pieces():
    model, twin, (x, y) = make_net(rate=0.5), make_net(rate=0.5), make_batch()
    split = value_and_grad(loss_fn, micro_batch_size=4)(model, x, y)
    pieces = [slice(0, 4), slice(4, 8), slice(8, 10)]
    parts = [nnx.value_and_grad(loss_fn)(twin, x[piece], y[piece]) for piece in pieces]
    shares = [0.4, 0.4, 0.2]
    by_hand = jax.tree.map(
        lambda *parts: sum(s * p for s, p in zip(shares, parts, strict=True)),
        *[(loss, plain(grads)) for loss, grads in parts],
    )
    assert_same((split[0], plain(split[1])), by_hand)
    assert model.dropout.rngs.count[...] == twin.dropout.rngs.count[...]


def test_batch_norm_is_refused_by_name():
    with pytest.raises(ValueError, match='norm: in training mode.*batch_norm="micro"'):
        value_and_grad(loss_fn, micro_batch_size=4)(make_net(norm=True), *make_batch())


@pytest.mark.parametrize("prepare", [lambda m: m.eval(), lambda m: None], ids=["in eval mode", "one piece"])
def test_batch_norm_is_no_obstacle(prepare):
    model, twin, batch = make_net(norm=True), make_net(norm=True), make_batch()
    prepare(model)
    prepare(twin)
    size = 10 if model.norm.use_running_average is False else 4
    split = value_and_grad(loss_fn, micro_batch_size=size)(model, *batch)
    whole = nnx.value_and_grad(loss_fn)(twin, *batch)
    assert_same((split[0], plain(split[1])), (whole[0], plain(whole[1])))
    assert_same(plain(nnx.state(model, nnx.BatchStat)), plain(nnx.state(twin, nnx.BatchStat)))


def moved(statistics, seed=3):
    """Statistics that are not those of a fresh layer."""
    draw = np.random.default_rng(seed).random
    return jax.tree.map(lambda leaf: jnp.asarray(draw(leaf.shape), leaf.dtype), statistics)


@pytest.mark.parametrize("momentum", [0.9, 0.0, 1.0])
@pytest.mark.parametrize("size", [1, 4, 5])
def test_batch_norm_by_micro_batch_has_the_statistics_of_the_whole(size, momentum):
    model, twin, (x, y) = make_net(norm=True, momentum=momentum), make_net(norm=True, momentum=momentum), make_batch()
    x = x + 3 * jnp.arange(10.0)[:, None]  # pieces with different means
    for net in (model, twin):
        nnx.update(net, moved(nnx.state(net, nnx.BatchStat)))
    with pytest.warns(UserWarning, match="norm: normalised by the statistics of each piece"):
        value_and_grad(loss_fn, micro_batch_size=size, batch_norm="micro")(model, x, y)
    nnx.value_and_grad(loss_fn)(twin, x, y)
    split, whole = plain(nnx.state(model, nnx.BatchStat)), plain(nnx.state(twin, nnx.BatchStat))
    assert_same(split, whole)


def test_one_warning_is_enough(recwarn):
    step = value_and_grad(loss_fn, micro_batch_size=4, batch_norm="micro")
    model = make_net(norm=True)
    step(model, *make_batch())
    step(model, *make_batch())
    assert len(recwarn) == 1


def test_statistics_updated_piece_by_piece_fail_the_same_comparison():
    """The negative control: what a loop of nnx.value_and_grad leaves."""
    loop, twin, (x, y) = make_net(norm=True), make_net(norm=True), make_batch()
    x = x + 3 * jnp.arange(10.0)[:, None]
    for i in range(0, 10, 5):
        nnx.value_and_grad(loss_fn)(loop, x[i : i + 5], y[i : i + 5])
    nnx.value_and_grad(loss_fn)(twin, x, y)
    with pytest.raises(AssertionError, match="is off by"):
        assert_same(plain(nnx.state(loop, nnx.BatchStat)), plain(nnx.state(twin, nnx.BatchStat)))


def test_averaging_variances_without_the_term_between_pieces_fails_too():
    twin, (x, y) = make_net(norm=True), make_batch()
    x = x + 3 * jnp.arange(10.0)[:, None]
    pieces = []
    for i in range(0, 10, 5):
        piece = make_net(norm=True)
        nnx.value_and_grad(loss_fn)(piece, x[i : i + 5], y[i : i + 5])
        pieces.append(plain(nnx.state(piece, nnx.BatchStat)))
    nnx.value_and_grad(loss_fn)(twin, x, y)
    averaged = jax.tree.map(lambda a, b: (a + b) / 2, *pieces)
    with pytest.raises(AssertionError, match="var.* is off by"):
        assert_same(averaged, plain(nnx.state(twin, nnx.BatchStat)))


def test_losses_of_every_form_with_aux_and_terms():
    model, (x, y) = make_net(), make_batch()

    def terms(model, x, y):
        squares = (model(x) - y) ** 2
        return {"a": Mean.of(squares, where=y > 0), "b": 0.1 * Mean.of(squares)}, {"squares": squares}

    (value, aux), grads = value_and_grad(terms, has_aux=True, return_terms=True, micro_batch_size=4)(model, x, y)
    loss, by_name = value
    squares = (model(x) - y) ** 2
    assert np.isclose(by_name["a"], squares[y > 0].mean(), rtol=1e-12)
    assert np.isclose(loss, squares[y > 0].mean() + 0.1 * squares.mean(), rtol=1e-12)
    assert_same(aux, {"squares": squares})
    whole = nnx.grad(
        lambda m: jnp.where(y > 0, (m(x) - y) ** 2, 0).sum() / (y > 0).sum() + 0.1 * ((m(x) - y) ** 2).mean()
    )(model)
    assert_same(plain(grads), plain(whole))


def test_other_variables_are_handed_from_piece_to_piece():
    class Calls(nnx.Variable):
        pass

    class Counting(nnx.Module):
        def __init__(self):
            self.w, self.calls = nnx.Param(jnp.ones(())), Calls(jnp.zeros((), int))

        def __call__(self, x):
            self.calls[...] += 1
            return self.w[...] * x.mean()

    model = Counting()
    nnx.jit(value_and_grad(lambda m, x: m(x), micro_batch_size=4))(model, jnp.ones(10))
    assert model.calls[...] == 3


def test_variables_that_appear_inside_the_loss_are_refused_by_name():
    class Sowing(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(()))

        def __call__(self, x):
            self.seen = nnx.Intermediate(x.mean())
            return self.w[...] * x.mean()

    def popping(model, x):
        return model(x), nnx.pop(model, nnx.Intermediate)["seen"][...]

    with pytest.raises(ValueError, match=r"adds or removes variables of the model \(seen\)"):
        value_and_grad(lambda m, x: m(x), micro_batch_size=4)(Sowing(), jnp.ones(10))
    (_, seen), _ = value_and_grad(popping, has_aux=True, micro_batch_size=4)(Sowing(), jnp.arange(10.0))
    assert seen == 4.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_norm": "ignore"}, 'batch_norm must be "refuse" or "micro", got .ignore.'),
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1"),
    ],
)
def test_options_that_cannot_be_meant(options, message):
    with pytest.raises(ValueError, match=message):
        value_and_grad(loss_fn, **options)


def test_calls_that_cannot_be_meant():
    model, batch = make_net(), make_batch()
    with pytest.raises(ValueError, match="argnums holds 3, but 3 positional arguments were given"):
        value_and_grad(loss_fn, argnums=3)(model, *batch)
    with pytest.raises(ValueError, match="argnums holds 0 twice"):
        value_and_grad(loss_fn, argnums=(0, nnx.DiffState(0, nnx.Param)))(model, *batch)
    with pytest.raises(ValueError, match="argument 0 holds no variable that its filter takes"):
        value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.Cache))(model, *batch)
    with pytest.raises(TypeError, match="dropout.*only floating point arrays can be differentiated"):
        value_and_grad(loss_fn, argnums=nnx.DiffState(0, ...))(model, *batch)
    with pytest.raises(ValueError, match="batch rows differ: x has 10, y has 8"):
        value_and_grad(loss_fn, micro_batch_size=4)(model, batch[0], batch[1][:8])
