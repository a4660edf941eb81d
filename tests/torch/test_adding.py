"""The gradient is added to what `.grad` held, in the tensor that held it, as `.backward()` would."""

import pytest
import torch
from models import make_data, make_loss, make_model, take_gradients, whole_gradients

from reference import assert_exact
from wholebatch import Mean
from wholebatch.torch import Accumulator, backward


@pytest.mark.parametrize("form", ["scalar", "mean"])
@pytest.mark.parametrize("size", [None, 4])
def test_batches_add_up(form, size):
    model = make_model()
    loss_fn = make_loss(model)

    def as_mean(piece):
        return Mean(loss_fn(piece) * len(piece[0]), len(piece[0]))

    first, second = make_data(10, 1), make_data(7, 2)
    whole = whole_gradients(model, lambda: loss_fn(first) + loss_fn(second))
    backward(model, loss_fn, first, micro_batch_size=size)
    tensors = [parameter.grad for parameter in model.parameters()]
    backward(model, loss_fn if form == "scalar" else as_mean, second, micro_batch_size=size)
    assert all(parameter.grad is tensor for parameter, tensor in zip(model.parameters(), tensors, strict=True))
    assert_exact(take_gradients(model), whole)


def test_a_plain_backward_before_and_after_adds_too():
    model, data = make_model(), make_data()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: 3 * loss_fn(data))
    loss_fn(data).backward()
    backward(model, loss_fn, data, micro_batch_size=3)
    loss_fn(data).backward()
    assert_exact(take_gradients(model), whole)


def test_a_gradient_that_no_piece_touches_stays():
    model, data = make_model(), make_data()
    unused = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    unused.grad = torch.full_like(unused, 5.0)
    kept = unused.grad
    Accumulator([*model.parameters(), unused], micro_batch_size=3).backward(make_loss(model), data)
    assert unused.grad is kept
    assert unused.grad.tolist() == [5.0, 5.0]


def test_clipping_sees_the_sum():
    model, data = make_model(), make_data()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: 3 * loss_fn(data))
    (2 * loss_fn(data)).backward()
    accumulator = Accumulator(model)
    x, y = data
    accumulator.add(loss_fn((x[:3], y[:3])), rows=3)
    accumulator.add(loss_fn((x[3:], y[3:])), rows=7)
    result = accumulator.finish(max_norm=1e-3)
    expected = sum((gradient**2).sum() for gradient in whole.values()) ** 0.5
    assert result.grad_norm.item() == pytest.approx(expected, rel=1e-12)
    clipped = {name: gradient * (1e-3 / (expected + 1e-6)) for name, gradient in whole.items()}
    assert_exact(take_gradients(model), clipped)


def test_an_unused_parameter_keeps_its_gradient_through_clipping_and_failure():
    model, (x, y) = make_model(), make_data()
    unused = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    unused.grad = torch.full_like(unused, 5.0)
    x[0] = float("inf")
    accumulator = Accumulator([*model.parameters(), unused], micro_batch_size=3)
    with pytest.raises(ArithmeticError):
        accumulator.step(make_loss(model), (x, y), torch.optim.SGD([unused], 0.1), max_norm=0.1)
    assert unused.grad.tolist() == [5.0, 5.0]
