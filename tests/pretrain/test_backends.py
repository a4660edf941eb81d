"""PyTorch and JAX: the same weights, data and settings give the same run."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tiny import SMALLEST, newest, records, remember_plans

from wholebatch import NonFiniteError, OptionError
from wholebatch.pretrain import jax_backend, torch_backend
from wholebatch.pretrain.ranks import Ranks
from wholebatch.pretrain.settings import Settings
from wholebatch.pretrain.weights import initial


@pytest.fixture(autouse=True)
def planned_once_in_jax(monkeypatch):
    remember_plans(monkeypatch, jax_backend.JaxBackend)
    monkeypatch.setattr("jax.device_count", lambda: 1)  # of those that all tests share


WIDE = ["--precision", "fp64", "--steps", 20]


def largest(a, b):
    assert a.keys() == b.keys()
    return max(np.abs(a[name] - b[name]).max() for name in a)


def test_losses_and_weights_agree_over_twenty_steps(train):
    ours, theirs = (train(*WIDE, "--backend", backend, out=backend).folder for backend in ("torch", "jax"))
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [r[name] for r in records(ours)] == pytest.approx([r[name] for r in records(theirs)], abs=1e-8, rel=0)
    for file in ("weights", "optimizer"):
        assert largest(*(load_file(newest(folder) / f"{file}.safetensors") for folder in (ours, theirs))) < 1e-8


@pytest.mark.parametrize("backend", [torch_backend, jax_backend], ids=["torch", "jax"])
def test_the_textbook_loop_does_not_agree_with_the_unsplit_batch(backend):
    """The control: it averages the means of pieces that are not equal."""
    rows = np.random.default_rng(0).integers(257, size=(5, 9))
    ours, whole, textbook = (backend.make(tiny_settings(precision="fp64"), 257, Ranks.alone()) for _ in range(3))
    ours.step(rows, 1, 0.01)
    whole.plain_step([rows], 1, 0.01)
    textbook.plain_step([rows[:4], rows[4:]], 1, 0.01)
    assert largest(whole.state().weights, ours.state().weights) < 1e-12
    assert largest(whole.state().weights, textbook.state().weights) > 1e-4
    assert textbook.peak_memory() > 0


@pytest.mark.parametrize("options", [{"dropout": 0.3}, {"precision": "fp16"}], ids=["dropout", "fp16"])
def test_a_run_in_jax_continues_to_the_bit(options):
    settings, random = tiny_settings(**options), np.random.default_rng(0)
    first, second = (jax_backend.make(settings, 257, Ranks.alone()) for _ in range(2))
    batches = random.integers(257, size=(4, 5, 9))
    for step in (1, 2):
        first.step(batches[step], step, 0.01)
    second.load(first.state())
    assert first.step(batches[3], 3, 0.01) == second.step(batches[3], 3, 0.01)
    ours, theirs = first.state(), second.state()
    assert largest(ours.weights, theirs.weights) == largest(ours.moments, theirs.moments) == 0
    assert ours.scalars == theirs.scalars


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_in_jax_agrees_as_far_as_it_goes(precision):
    rows = np.random.default_rng(0).integers(257, size=(5, 9))
    expected, got = (
        jax_backend.make(tiny_settings(precision=p), 257, Ranks.alone()).step(rows, 1, 0.01)
        for p in ("fp32", precision)
    )
    assert got.loss == pytest.approx(expected.loss, abs=0.02)
    assert got.grad_norm == pytest.approx(expected.grad_norm, rel=0.02)


@pytest.mark.parametrize("backend", [torch_backend, jax_backend], ids=["torch", "jax"])
def test_an_overflow_in_half_precision_leaves_the_step_out(backend):
    settings = tiny_settings(precision="fp16")
    made = backend.make(settings, 257, Ranks.alone())
    state = made.state()
    state.weights["norm.weight"] = np.full(8, 6e4, np.float32)
    made.load(state)
    before = made.state().weights["tokens.weight"].copy()
    assert not made.step(np.ones((5, 9), np.int64), 1, 0.01).stepped
    assert (made.state().weights["tokens.weight"] == before).all()


def test_the_unsplit_step_in_half_precision_is_scaled_too():
    """The first step moves each weight by about the learning rate."""
    rows = np.random.default_rng(0).integers(257, size=(5, 9))
    ours, plain, begun = (torch_backend.make(tiny_settings(precision="fp16"), 257, Ranks.alone()) for _ in range(3))
    ours.step(rows, 1, 0.01)
    plain.plain_step([rows], 1, 0.01)
    weights = [made.state().weights["blocks.0.up.weight"] for made in (ours, plain, begun)]
    assert np.abs(weights[0] - weights[1]).mean() < 1e-3
    assert np.abs(weights[0] - weights[2]).mean() > 5e-3


def error_of_the_host():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    return caught.value


MEMORY = [
    (torch_backend, torch.OutOfMemoryError("CUDA out of memory.")),
    (torch_backend, MemoryError()),
    (torch_backend, error_of_the_host()),
    (jax_backend, jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.")),
]


@pytest.mark.parametrize(("backend", "error"), MEMORY, ids=["torch", "Python", "host", "jax"])
def test_memory_that_runs_out_is_known_from_other_errors(backend, error):
    made = backend.make(tiny_settings(), 257, Ranks.alone())
    assert made.ran_out(error)
    assert not made.ran_out(RuntimeError("shapes do not match"))
    assert not made.ran_out(jax.errors.JaxRuntimeError("INTERNAL: something else"))


@pytest.mark.parametrize("backend", [torch_backend, jax_backend], ids=["torch", "jax"])
def test_a_loss_that_is_not_finite_ends_the_run(backend):
    made = backend.make(tiny_settings(), 257, Ranks.alone())
    state = made.state()
    state.weights["norm.weight"] = np.full(8, np.inf, np.float32)
    made.load(state)
    with pytest.raises(NonFiniteError):
        made.step(np.ones((5, 9), np.int64), 1, 0.01)


def test_two_devices_are_one(monkeypatch):
    settings, rows = tiny_settings(precision="fp64", batch_size=6), np.random.default_rng(0).integers(257, size=(6, 9))
    one = jax_backend.make(settings, 257, Ranks.alone())
    monkeypatch.setattr("jax.device_count", lambda: 2)
    two = jax_backend.make(settings, 257, Ranks.alone())
    for step in (1, 2):
        ours, theirs = one.step(rows, step, 0.01), two.step(rows, step, 0.01)
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-12)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, abs=1e-12)
    assert largest(one.state().weights, two.state().weights) < 1e-12
    two.load(one.state())
    assert two.step(rows, 3, 0.01).loss == pytest.approx(one.step(rows, 3, 0.01).loss, abs=1e-12)


def test_a_batch_that_devices_cannot_share_is_refused(monkeypatch):
    monkeypatch.setattr("jax.device_count", lambda: 2)
    with pytest.raises(
        OptionError, match="--batch-size 5 cannot be shared out evenly over 2 devices: give a multiple of 2"
    ):
        jax_backend.make(tiny_settings(), 257, Ranks.alone())


def test_weights_come_from_the_seed_alone():
    settings = tiny_settings()
    assert largest(initial(settings, 257), initial(settings, 257)) == 0
    assert largest(initial(settings, 257), initial(dataclasses.replace(settings, seed=1), 257)) > 0.01


@pytest.mark.parametrize("other", ["torch", "jax"])
def test_neither_backend_needs_the_other(other):
    backend = {"torch": "jax", "jax": "torch"}[other]
    program = (
        f"import sys; sys.modules['{other}'] = None; import wholebatch.pretrain; "
        f"assert '{backend}' not in sys.modules; import wholebatch.pretrain.{backend}_backend"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def tiny_settings(**others):
    return Settings.of({**SMALLEST, "steps": 4, **others})
