"""Ten steps of a raw full-batch loop and of ours end with equal weights, whatever the optimizer."""

import pytest
import torch
from models import make_data, make_loss, make_model
from torch import nn

from reference import assert_exact
from wholebatch import OptionError
from wholebatch.torch import Accumulator

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.01),
}


def weights(model):
    return {name: p.detach().clone().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_ten_steps(make):
    raw, ours = make_model(), make_model()
    raw_optimizer, our_optimizer = make(raw.parameters()), make(ours.parameters())
    accumulator = Accumulator(ours, micro_batch_size=3)
    start = weights(raw)
    for batch in range(10):
        data = make_data(5 + batch, batch)
        raw.zero_grad()
        make_loss(raw)(data).backward()
        nn.utils.clip_grad_norm_(raw.parameters(), 0.5)
        raw_optimizer.step()
        assert accumulator.step(make_loss(ours), data, our_optimizer, max_norm=0.5).stepped
    with pytest.raises(AssertionError):
        assert_exact(weights(raw), start, tolerance=1e-2)  # training moved the weights
    assert_exact(weights(ours), weights(raw), tolerance=1e-8)


def test_the_mean_of_means_ends_elsewhere():
    raw, naive = make_model(), make_model()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (raw, naive)]
    for batch in range(10):
        data = make_data(7, batch)
        make_loss(raw)(data).backward()
        for x, y in zip(data[0].split(5), data[1].split(5), strict=True):
            (make_loss(naive)((x, y)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(weights(naive), weights(raw), tolerance=1e-8)


def test_lbfgs_is_refused_with_the_way_that_is_right():
    raw, ours, data = make_model(), make_model(), make_data()
    raw_optimizer, our_optimizer = (torch.optim.LBFGS(m.parameters(), lr=0.5, max_iter=5) for m in (raw, ours))
    accumulator = Accumulator(ours, micro_batch_size=3)
    with pytest.raises(OptionError, match=r"LBFGS evaluates the loss several times per step.*accumulator\.backward"):
        accumulator.step(make_loss(ours), data, our_optimizer)

    def raw_closure():
        raw_optimizer.zero_grad()
        loss = make_loss(raw)(data)
        loss.backward()
        return loss

    def our_closure():
        our_optimizer.zero_grad()
        return accumulator.backward(make_loss(ours), data).loss

    for _ in range(3):
        raw_optimizer.step(raw_closure)
        our_optimizer.step(our_closure)
    assert_exact(weights(ours), weights(raw), tolerance=1e-8)


def test_a_scheduler_that_follows_a_validation_loss_is_left_to_the_caller():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(OptionError, match="ReduceLROnPlateau follows a validation loss: step it yourself"):
        Accumulator(model).step(make_loss(model), make_data(), optimizer, scheduler=plateau)


def test_a_scheduler_stepped_per_piece_ends_elsewhere():
    """The negative control of one scheduler step per batch."""
    raw, ours, naive = make_model(), make_model(), make_model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (raw, ours, naive)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    accumulators = [Accumulator(m, micro_batch_size=3) for m in (ours, naive)]
    for batch in range(3):
        data = make_data(10, batch)
        make_loss(raw)(data).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        schedulers[0].step()
        accumulators[0].step(make_loss(ours), data, optimizers[1], scheduler=schedulers[1])
        pieces = accumulators[1].step(make_loss(naive), data, optimizers[2]).num_micro_batches
        for _ in range(pieces):
            schedulers[2].step()
    assert_exact(weights(ours), weights(raw), tolerance=1e-9)
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(weights(naive), weights(raw), tolerance=1e-3)
