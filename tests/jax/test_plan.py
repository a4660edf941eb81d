"""Plan in JAX: what the compiler says a step takes, and the size that fits."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import optax
import pytest
from flax import nnx
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from wholebatch import BatchError, BudgetError, Mean, OptionError, OptionTypeError
from wholebatch.jax import _plan, plan, value_and_grad

AMPLE = "64GiB"
SHAPES = {"hidden": jax.ShapeDtypeStruct((64, 256), jnp.float32), "out": jax.ShapeDtypeStruct((256, 8), jnp.float32)}
X, Y = jax.ShapeDtypeStruct((1024, 64), jnp.float32), jax.ShapeDtypeStruct((1024, 8), jnp.float32)


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["out"] - y) ** 2)


def test_the_peak_is_what_the_compiler_says_of_the_step():
    optimizer = optax.adamw(1e-3)

    def step(params, state, x, y):
        loss, gradients = value_and_grad(loss_fn, micro_batch_size=16)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return loss, optax.apply_updates(params, updates), state

    state = jax.eval_shape(optimizer.init, SHAPES)
    said = jax.jit(step, donate_argnums=(0, 1)).lower(SHAPES, state, X, Y).compile().memory_analysis()
    own = said.argument_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes
    found = plan(loss_fn, SHAPES, X, Y, memory=AMPLE, optimizer=optimizer)
    assert found.peak(16) == pytest.approx(own + said.temp_size_in_bytes, rel=0.001)


def test_the_plan_is_the_largest_size_that_fits():
    ample = plan(loss_fn, SHAPES, X, Y, memory=AMPLE)
    assert ample.micro_batch_size == 1024
    found = plan(loss_fn, SHAPES, X, Y, memory=ample.peak(64))
    assert 64 <= found.micro_batch_size < 1024
    assert found.predicted_peak <= found.memory < found.peak(1024)
    assert found.num_micro_batches == -(-1024 // found.micro_batch_size)


def test_the_parts_are_those_of_the_parameters_and_the_optimizer():
    found = plan(loss_fn, SHAPES, X, Y, memory=AMPLE, optimizer=optax.adamw(1e-3))
    own = 4 * (64 * 256 + 256 * 8)
    assert found.parts["parameters"] == found.parts["gradients"] == own
    assert found.parts["optimizer"] == pytest.approx(2 * own, abs=16)
    assert sum(found.parts.values()) + 1023 * found.parts["activations_per_row"] == found.predicted_peak
    assert found.parts["activations_per_row"] > 0


@pytest.fixture
def compiled(monkeypatch):
    """The sizes for which a program was compiled."""
    sizes = []
    compile_ = _plan._Programs._compile
    monkeypatch.setattr(_plan._Programs, "_compile", lambda self, size: sizes.append(size) or compile_(self, size))
    return sizes


def sums_along(w, x, least=0):
    """Takes the memory of `least` rows, however few there are."""
    x = jnp.concatenate([x, jnp.zeros((max(0, least - len(x)), *x.shape[1:]), x.dtype)])
    return jnp.mean(jnp.cumsum(jnp.tanh(x * w), 1) ** 2)


LONG = jax.ShapeDtypeStruct((64,), jnp.float32), jax.ShapeDtypeStruct((1024, 256, 64), jnp.float32)


def test_few_sizes_are_compiled_where_peaks_lie_on_a_line(compiled):
    found = plan(sums_along, *LONG, memory=AMPLE)
    assert sorted(compiled) == [1, 16, 512, 1024]
    compiled.clear()
    assert plan(sums_along, *LONG, memory=found.peak(300)).micro_batch_size >= 256
    assert len(compiled) <= 6


def test_more_sizes_are_compiled_where_they_do_not(compiled):
    found = plan(functools.partial(sums_along, least=64), *LONG, memory=AMPLE)
    assert sorted(compiled) == [1, 4, 16, 64, 256, 512, 1024]
    assert found.peak(40) == pytest.approx(found.peak(1), rel=0.01), "and not on the way to 512"


def test_devices_are_given_sizes_that_they_can_share(compiled):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x, y = (jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, PartitionSpec("data"))) for a in (X, Y))
    ample = plan(loss_fn, SHAPES, x, y, memory=AMPLE, data_axis="data", mesh=mesh)
    assert ample.predicted_peak < plan(loss_fn, SHAPES, X, Y, memory=AMPLE).predicted_peak / 2, "each has a share"
    found = plan(loss_fn, SHAPES, x, y, memory=ample.peak(256), data_axis="data", mesh=mesh)
    assert 256 <= found.micro_batch_size < 1024
    assert all(size % 8 == 0 for size in [found.micro_batch_size, *found.curve])
    assert next(line.split()[0] for line in str(found).splitlines() if line.startswith("    ")) == "8"
    with pytest.raises(BatchError, match="the batch has 1020 rows, which the 8 devices along 'data' cannot share"):
        plan(
            loss_fn,
            SHAPES,
            X.update(shape=(1020, 64)),
            Y.update(shape=(1020, 8)),
            memory=AMPLE,
            data_axis="data",
            mesh=mesh,
        )
    with pytest.raises(BudgetError, match="even with 8 rows, one for each device, at a time"):
        plan(loss_fn, SHAPES, x, y, memory="1KB", data_axis="data", mesh=mesh)


def test_sizes_that_divide_the_batch_need_no_second_program():
    ample = plan(loss_fn, SHAPES, X, Y, memory=AMPLE)
    assert plan(loss_fn, SHAPES, X, Y, memory=ample.peak(256)).micro_batch_size == 256


def test_a_budget_too_small_for_one_row_names_what_would_do():
    with pytest.raises(BudgetError, match="is too little: a step needs") as error:
        plan(loss_fn, SHAPES, X, Y, memory="1KB")
    assert plan(loss_fn, SHAPES, X, Y, memory=error.value.needed).predicted_peak <= error.value.needed


def test_arrays_scalars_keys_and_aux():
    def noisy(params, x, y, scale, key):
        dropped = x * jax.random.bernoulli(key, 0.5, x.shape)
        loss = Mean(scale * ((dropped @ params) ** 2).sum() + y.sum(), x.shape[0])
        return loss, {"largest": dropped.max()}

    x, y = jnp.ones((8, 4)), jnp.ones(8)
    given = (noisy, jnp.ones((4, 4)), x, y, 2.0, jax.random.key(0))
    assert plan(*given, memory=AMPLE, has_aux=True, rng_argnums=4).micro_batch_size == 8


def test_a_module_of_nnx_is_planned_and_left_as_it_is():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    kernel = model.kernel[...]
    found = plan(lambda m, x: jnp.mean(m(x) ** 2), model, X, memory=AMPLE, optimizer=optax.sgd(0.1))
    assert found.rows == 1024
    assert found.parts["parameters"] == 4 * (64 * 64 + 64)
    assert model.kernel[...] is kernel or jnp.array_equal(model.kernel[...], kernel)


def test_bad_options():
    with pytest.raises(OptionError, match="micro_batch_size is what plan finds: leave it out"):
        plan(loss_fn, SHAPES, X, Y, memory=AMPLE, micro_batch_size=4)
    with pytest.raises(OptionTypeError, match="optimizer must have init and update, as optax's do, got str"):
        plan(loss_fn, SHAPES, X, Y, memory=AMPLE, optimizer="adamw")
    with pytest.raises(OptionError, match='memory must be a number and a unit, such as "24GiB"'):
        plan(loss_fn, SHAPES, X, Y, memory="much")


RESIDENT = """
import re
from pathlib import Path

import jax
import optax
from jax import numpy as jnp

from wholebatch import Mean
from wholebatch.jax import value_and_grad

VOCABULARY, WIDTH, LAYERS, LENGTH, HEADS = 50_257, 256, 4, 64, 4
ids = jnp.arange(8 * LENGTH).reshape(8, LENGTH) % VOCABULARY

def of(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")

def block():
    return {"qkv": of(WIDTH, 3 * WIDTH), "out": of(WIDTH, WIDTH), "up": of(WIDTH, 4 * WIDTH), "down": of(4 * WIDTH, WIDTH)}

shapes = {"tokens": of(VOCABULARY, WIDTH), "positions": of(LENGTH, WIDTH), "head": of(WIDTH, VOCABULARY),
          "blocks": [block() for _ in range(LAYERS)]}

def loss_fn(params, ids):
    x = params["tokens"][ids] + params["positions"]
    for block in params["blocks"]:
        q, k, v = jnp.moveaxis((x @ block["qkv"]).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS), 2, 0)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu(x @ block["up"]) @ block["down"]
    log_probabilities = jax.nn.log_softmax(x[:, :-1] @ params["head"])
    losses = -jnp.take_along_axis(log_probabilities, ids[:, 1:, None], -1)
    return Mean(losses.sum(), losses.size)

def step(params, state, ids):
    loss, gradients = value_and_grad(loss_fn, micro_batch_size=4)(params, ids)
    updates, state = optimizer.update(gradients, state, params)
    return loss, optax.apply_updates(params, updates), state

def resident(what):
    return int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

optimizer = optax.adamw(1e-3)
states = jax.eval_shape(optimizer.init, shapes)
compiled = jax.jit(step, donate_argnums=(0, 1)).lower(shapes, states, ids).compile()
of_params = jax.jit(lambda: jax.tree.map(lambda shape: jnp.full(shape.shape, 0.01), shapes)).lower().compile()
of_state = jax.jit(optimizer.init).lower(shapes).compile()
said = compiled.memory_analysis()  # what plan goes by
expected = said.argument_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes + said.temp_size_in_bytes
jax.jit(jax.grad(lambda a: jax.nn.log_softmax(a @ a.T).sum()))(jnp.ones((512, 512))).block_until_ready()
before = resident("VmRSS")  # what libraries take for themselves once is there
params = of_params()
state = of_state(params)
jax.block_until_ready((params, state))
Path("/proc/self/clear_refs").write_text("5")
for _ in range(2):
    loss, params, state = compiled(params, state, ids)
    loss.block_until_ready()
print(expected, resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_what_the_compiler_says_is_the_growth_of_the_process():
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment.pop("XLA_FLAGS", None)  # programs as users compile them
    ran = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True, env=environment)
    expected, grown = map(int, ran.stdout.split())
    assert expected == pytest.approx(grown, rel=0.10), (expected, grown)
