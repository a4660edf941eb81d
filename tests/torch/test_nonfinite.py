"""Losses, counts and norms that are not finite: raise, skip or keep."""

import pytest
import torch
from models import make_data, make_loss, make_model

from wholebatch import Mean, NonFiniteError
from wholebatch.torch import Accumulator


def poisoned(value=float("nan"), row=7):
    x, y = make_data()
    x[row] = value
    return x, y


def test_raise_names_the_piece_and_the_term():
    model, data = make_model(), poisoned()
    loss_fn = make_loss(model)
    with pytest.raises(NonFiniteError, match="term 'loss' of piece 3 of 3 is nan; .grad is as it was before"):
        Accumulator(model, micro_batch_size=4).backward(loss_fn, data)
    with pytest.raises(NonFiniteError, match="term 'bad' of piece 2 of 2 is nan"):
        Accumulator(model, micro_batch_size=5).backward(
            lambda b: {"good": model(make_data()[0]).mean(), "bad": loss_fn(b)}, data
        )


@pytest.mark.parametrize("given", [float, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("count", [float("nan"), float("inf")])
def test_a_count_follows_the_policy(count, declared, given):
    model, data = make_model(), make_data()
    loss_fn = make_loss(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(policy):
        accumulator = Accumulator(model, micro_batch_size=5, on_nonfinite=policy)
        counts = (lambda b: given(count)) if declared else None
        return accumulator.step(lambda b: Mean(loss_fn(b), given(count)), data, optimizer, counts=counts)

    with pytest.raises(NonFiniteError, match=f"term 'loss' of piece 1 of 2 has the count {count}"):
        step("raise")
    assert all(p.grad is None for p in model.parameters())
    assert not step("skip").stepped
    assert all(p.isfinite().all() for p in model.parameters())
    assert step("keep").stepped


def infinite_gradient(model):
    """A finite loss whose gradient is not."""
    return lambda piece: model(piece[0]).square().sum().mul(0).sqrt()


def test_a_norm_that_is_not_finite_raises_only_where_it_is_computed():
    model, data = make_model(), make_data()
    accumulator = Accumulator(model, micro_batch_size=5)
    with pytest.raises(NonFiniteError, match="the norm of the gradient is nan"):
        accumulator.step(infinite_gradient(model), data, torch.optim.SGD(model.parameters(), 0.1), max_norm=1.0)
    assert all(parameter.grad is None for parameter in model.parameters())
    accumulator.backward(infinite_gradient(model), data)


def test_skip_takes_no_step_and_goes_on():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accumulator = Accumulator(model, micro_batch_size=4, on_nonfinite="skip")
    weights = [p.detach().clone() for p in model.parameters()]

    skipped = accumulator.step(make_loss(model), poisoned(), optimizer, scheduler=scheduler)
    assert (skipped.stepped, accumulator.skipped, scheduler.last_epoch) == (False, 1, 0)
    assert skipped.loss.isnan()
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))

    stepped = accumulator.step(make_loss(model), make_data(), optimizer, scheduler=scheduler)
    assert (stepped.stepped, accumulator.skipped, scheduler.last_epoch) == (True, 1, 1)


def test_skip_without_an_optimizer_contributes_nothing():
    model = make_model()
    before = torch.ones_like(model[0].weight)
    model[0].weight.grad = before
    accumulator = Accumulator(model, micro_batch_size=4, on_nonfinite="skip")
    accumulator.backward(make_loss(model), poisoned())
    assert model[0].weight.grad is before
    assert torch.equal(before, torch.ones_like(before))
    assert accumulator.skipped == 1


def test_keep_does_nothing():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, micro_batch_size=4, on_nonfinite="keep")
    assert accumulator.step(make_loss(model), poisoned(), optimizer, max_norm=1.0).stepped
    assert model[0].weight.isnan().any()
    assert accumulator.skipped == 0


def test_a_finite_batch_is_left_alone_by_all():
    model, data = make_model(), make_data()
    for policy in ("raise", "skip", "keep"):
        result = Accumulator(model, micro_batch_size=4, on_nonfinite=policy).backward(make_loss(model), data)
        assert result.loss.isfinite()


def test_skip_forgets_what_the_batch_left_in_buffers():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4).double(), make_model())
    accumulator = Accumulator(model, on_nonfinite="skip")
    accumulator.step(make_loss(model), poisoned(), torch.optim.SGD(model.parameters(), 0.1))
    assert accumulator.skipped == 1
    assert model[0].running_mean.isfinite().all()
    assert model[0].num_batches_tracked == 0
