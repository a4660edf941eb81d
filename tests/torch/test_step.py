"""One of each per batch: one optimizer step, one clip, one scheduler step."""

import pytest
import torch
from models import make_data, make_loss, make_model, take_gradients, whole_gradients

from reference import assert_exact
from wholebatch import OptionTypeError
from wholebatch.torch import Accumulator


def raw_step(model, data, optimizer, max_norm=None):
    make_loss(model)(data).backward()
    norm = None if max_norm is None else torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def weights(model):
    return {name: p.detach().clone().numpy() for name, p in model.named_parameters()}


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 0.05, 1e6])
def test_steps_end_with_the_weights_of_a_raw_loop(make, max_norm):
    raw, ours = make_model(), make_model()
    raw_optimizer, our_optimizer = make(raw.parameters()), make(ours.parameters())
    accumulator = Accumulator(ours, micro_batch_size=4)
    start = weights(raw)
    for seed in range(5):
        data = make_data(7 + seed, seed)
        norm = raw_step(raw, data, raw_optimizer, max_norm)
        result = accumulator.step(make_loss(ours), data, our_optimizer, max_norm=max_norm)
        assert result.stepped
        assert (result.grad_norm is None) == (norm is None)
        if norm is not None:
            assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-9)
    with pytest.raises(AssertionError):
        assert_exact(weights(raw), start, tolerance=1e-3)  # training moved the weights
    assert_exact(weights(ours), weights(raw), tolerance=1e-10)


def test_clipping_every_piece_fails_the_same_comparison():
    raw, wrong = make_model(), make_model()
    data = make_data()
    raw_step(raw, data, torch.optim.SGD(raw.parameters(), lr=0.1), max_norm=0.05)
    for x, y in zip(data[0].split(5), data[1].split(5), strict=True):
        (make_loss(wrong)((x, y)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(wrong.parameters(), 0.05)
    torch.optim.SGD(wrong.parameters(), lr=0.1).step()
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(weights(wrong), weights(raw), tolerance=1e-10)


def test_gradients_are_zeroed_after_a_step():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Accumulator(model, micro_batch_size=4).step(make_loss(model), make_data(), optimizer)
    assert all(p.grad is None for p in model.parameters())


def test_several_optimizers_and_schedulers_step_once_each():
    model, twin = make_model(), make_model()
    parts = [model[0].parameters(), model[2].parameters()]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]
    steps = []
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
    Accumulator(model, micro_batch_size=3).step(make_loss(model), make_data(), optimizers, scheduler=schedulers)
    raw_step(twin, make_data(), torch.optim.SGD(twin.parameters(), lr=0.1))
    assert len(steps) == 2
    assert [scheduler.last_epoch for scheduler in schedulers] == [1, 1]
    assert_exact(weights(model), weights(twin))


@pytest.mark.parametrize("had_gradients", [False, True])
def test_a_norm_over_several_pieces_and_old_gradients_is_that_of_the_sum(had_gradients):
    model, data = make_model(), make_data()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: (2 if had_gradients else 1) * loss_fn(data))
    if had_gradients:
        loss_fn(data).backward()
    accumulator = Accumulator(model)
    for x, y in zip(data[0].split(3), data[1].split(3), strict=True):
        accumulator.add(loss_fn((x, y)), rows=len(x))
    norm = accumulator.finish(max_norm=1e9).grad_norm
    assert norm.item() == pytest.approx(sum((g**2).sum() for g in whole.values()) ** 0.5, rel=1e-12)
    assert_exact(take_gradients(model), whole)


def test_gradients_of_the_model_and_of_the_optimizer_are_zeroed():
    model, other = make_model(), torch.nn.Parameter(torch.ones(1))
    for parameters in ([model[0].weight], [*model.parameters(), other]):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        other.grad = torch.ones(1)
        Accumulator(model, micro_batch_size=4).step(make_loss(model), make_data(), optimizer)
        assert all(p.grad is None for p in model.parameters())
        assert all(p.grad is None for p in parameters)


@pytest.mark.parametrize("optimizer", [None, [], ()])
def test_a_step_needs_an_optimizer(optimizer):
    with pytest.raises(OptionTypeError, match="optimizer must be a torch optimizer or a sequence of them, got none"):
        Accumulator(make_model()).step(lambda b: pytest.fail("called"), make_data(), optimizer)


def test_an_infinite_norm_measures_and_does_not_clip():
    model, data = make_model(), make_data()
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    accumulator = Accumulator(model)
    accumulator.add(make_loss(model)(data), rows=10)
    norm = accumulator.finish(max_norm=float("inf")).grad_norm
    assert norm.item() == pytest.approx(sum((g**2).sum() for g in whole.values()) ** 0.5, rel=1e-12)
    assert_exact(take_gradients(model), whole)
