"""A batch that fails leaves no trace: gradients, buffers and random generators are as before the call."""

import warnings

import numpy as np
import pytest
import torch
from models import make_data, make_loss, make_model, take_gradients, whole_gradients
from torch import nn

from reference import assert_exact
from wholebatch import Mean, WholeBatchError
from wholebatch.torch import Accumulator


class Disturbing(nn.Module):
    """Draws random numbers and changes its buffers in every way that modules do."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("rebound", torch.ones(2))
        self.register_buffer("absent", None)

    def forward(self, x):
        self.calls += 1
        self.rebound = self.rebound * 2
        self.absent = torch.ones(1)
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(1))
        return self.inner(x) + torch.rand(()) * 0


def failing_at(loss_fn, piece_number, error):
    seen = 0

    def fail(piece):
        nonlocal seen
        seen += 1
        if seen == piece_number:
            raise error
        return loss_fn(piece)

    return fail


ERRORS = [RuntimeError("boom"), KeyboardInterrupt(), MemoryError(), torch.OutOfMemoryError("out of memory")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("piece_number", [1, 2, 4])
@pytest.mark.parametrize("had_gradients", [False, True])
def test_a_failing_piece_leaves_no_trace(error, piece_number, had_gradients):
    model, data = Disturbing(), make_data()
    loss_fn = make_loss(model)
    if had_gradients:
        nn.functional.cross_entropy(model.inner(data[0]), data[1]).backward()
        model.inner[0].bias.grad = None  # None stays None also beside others
    gradients = {name: p.grad for name, p in model.named_parameters()}
    contents = {name: None if g is None else g.clone() for name, g in gradients.items()}
    buffers = {name: (b, b.clone()) for name, b in model.named_buffers()}
    random_state = torch.get_rng_state()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = [p.detach().clone() for p in model.parameters()]
    accumulator = Accumulator(model, num_micro_batches=4)
    with pytest.raises(type(error)) as caught:
        accumulator.step(failing_at(loss_fn, piece_number, error), data, optimizer)
    assert caught.value is error

    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name]
        assert contents[name] is None or torch.equal(parameter.grad, contents[name])
    assert {name: b for name, (b, _) in buffers.items()} == dict(model.named_buffers())
    assert all(torch.equal(b, before) for b, before in buffers.values())
    assert model.absent is None
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))

    assert accumulator.step(loss_fn, data, optimizer).stepped, "the same accumulator goes on"


def test_the_disturbing_model_does_disturb():
    """Or the test above would show nothing."""
    model, data = Disturbing(), make_data()
    random_state = torch.get_rng_state()
    rebound = model.rebound
    Accumulator(model, num_micro_batches=4).backward(make_loss(model), data)
    assert model.calls == 4
    assert model.rebound is not rebound
    assert model.absent is not None
    assert "late" in dict(model.named_buffers())
    assert not torch.equal(torch.get_rng_state(), random_state)


def test_a_backward_that_fails_half_way_leaves_no_trace():
    model, data = make_model(), make_data()
    calls = []

    def hook(gradient):
        calls.append(gradient)
        if len(calls) == 2:
            raise RuntimeError("hook")

    model[0].weight.register_hook(hook)  # fires after the head's gradient has been summed
    with pytest.raises(RuntimeError, match="hook"):
        Accumulator(model, num_micro_batches=3).backward(make_loss(model), data)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_verdict_that_raises_leaves_no_trace():
    model, (x, y) = make_model(), make_data()
    x[7] = float("nan")
    before = torch.ones_like(model[0].weight)
    model[0].weight.grad = before
    with pytest.raises(WholeBatchError):
        Accumulator(model, num_micro_batches=3).step(
            make_loss(model), (x, y), torch.optim.SGD(model.parameters(), 0.1), max_norm=1.0
        )
    assert model[0].weight.grad is before
    assert torch.equal(before, torch.ones_like(before))
    assert model[0].bias.grad is None


def test_counts_that_fail_leave_no_trace():
    model, data = make_model(), make_data()
    random_state = torch.get_rng_state()

    def counts(piece):
        torch.rand(1)
        raise RuntimeError("counts")

    with pytest.raises(RuntimeError, match="counts"):
        Accumulator(model, micro_batch_size=4).backward(make_loss(model), data, counts=counts)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_failing_optimizer_is_past_the_point_of_return():
    model, data = make_model(), make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("step")))
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    with pytest.raises(RuntimeError, match="step"):
        Accumulator(model, micro_batch_size=4).step(make_loss(model), data, optimizer)
    assert_exact(take_gradients(model), whole)


def test_what_was_added_is_forgotten_when_a_piece_fails():
    model, (x, y) = make_model(), make_data()
    loss_fn = make_loss(model)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    accumulator = Accumulator(model)
    accumulator.add(loss_fn((x, y)), rows=10)
    with pytest.raises(WholeBatchError):
        accumulator.add(np.float64(1.0))
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[0].bias.grad is None
    with pytest.raises(WholeBatchError, match="nothing was added"):
        accumulator.finish()


def test_discard_forgets_and_the_next_batch_is_right():
    model, (x, y) = make_model(), make_data()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: loss_fn((x, y)))
    accumulator = Accumulator(model)
    accumulator.add(Mean(loss_fn((x, y)) * 7, 3))
    accumulator.discard()
    accumulator.discard()
    assert all(parameter.grad is None for parameter in model.parameters())
    accumulator.add(loss_fn((x, y)), rows=10)
    accumulator.finish()
    assert_exact(take_gradients(model), whole)


def test_raise_restores_buffers_and_generators_too():
    model, (x, y) = Disturbing(), make_data()
    x[7] = float("nan")
    buffers = {name: (b, b.clone()) for name, b in model.named_buffers()}
    random_state = torch.get_rng_state()
    with pytest.raises(ArithmeticError):
        Accumulator(model, num_micro_batches=3).backward(make_loss(model), (x, y))
    assert {name: b for name, (b, _) in buffers.items()} == dict(model.named_buffers())
    assert all(torch.equal(b, before) for b, before in buffers.values())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_buffers_that_cannot_be_written_or_exchanged_do_not_hide_the_error():
    class Expanded(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model()
            self.register_buffer("expanded", torch.zeros(1).expand(5))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.inner(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is on its way out
        scripted = torch.jit.script(make_model())
    for model in (Expanded(), scripted):
        with pytest.raises(RuntimeError, match="boom"):
            Accumulator(model, num_micro_batches=4).backward(
                failing_at(make_loss(model), 3, RuntimeError("boom")), make_data()
            )
        assert all(not buffer.any() for buffer in model.buffers())


@pytest.mark.parametrize("at", ["begin", "add", "finalise", "judge", "commit"])
def test_an_interrupt_anywhere_before_the_step_leaves_no_trace(at, monkeypatch):
    model, data = Disturbing(), make_data()
    places = {
        "begin": "wholebatch.torch._sums._sum_dtype",
        "add": "wholebatch.torch._sums._run",
        "finalise": "wholebatch.torch._batch.finalise",
        "judge": "wholebatch.torch._batch.judge",
        "commit": "wholebatch.torch._batch.GradientSums.commit",
    }
    gradients = {}
    for name, parameter in model.named_parameters():
        parameter.grad = torch.ones_like(parameter) if name != "inner.0.bias" else None
        gradients[name] = parameter.grad
    random_state = torch.get_rng_state()

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(places[at], interrupt)
    with pytest.raises(KeyboardInterrupt):
        Accumulator(model, num_micro_batches=3).step(make_loss(model), data, torch.optim.SGD(model.parameters(), 0.1))
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name]
        assert parameter.grad is None or torch.equal(parameter.grad, torch.ones_like(parameter))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.calls == 0
