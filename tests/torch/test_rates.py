"""Learning rates that follow the batch size."""

import pytest
import torch

from wholebatch import OptionError
from wholebatch.torch import scale_lr


def make_optimizer():
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.01)]
    return torch.optim.SGD(groups)


@pytest.mark.parametrize(("rule", "scale"), [("linear", 16.0), ("sqrt", 4.0), ("none", 1.0)])
def test_rules(rule, scale):
    scheduler = scale_lr(make_optimizer(), batch_size=512, base_batch_size=32, rule=rule)
    assert scheduler.get_last_lr() == pytest.approx([0.1 * scale, 0.01 * scale])
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)


def test_the_warm_up_counts_optimizer_steps():
    optimizer = make_optimizer()
    scheduler = scale_lr(optimizer, batch_size=64, base_batch_size=32, warmup_steps=4)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2, 0.2])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"base_batch_size": 0.5}, "base_batch_size must be a positive integer"),
        ({"rule": "cubic"}, 'rule must be "linear", "sqrt" or "none", got \'cubic\''),
        ({"warmup_steps": -1}, "warmup_steps must be at least 1"),
    ],
)
def test_misuse_is_refused(options, text):
    with pytest.raises(OptionError, match=text):
        scale_lr(make_optimizer(), **{"batch_size": 64, "base_batch_size": 32} | options)


@pytest.mark.parametrize("how", ["sequential", "list"])
def test_a_decay_follows_from_the_scaled_rate(how):
    optimizer = make_optimizer()
    warm_up = scale_lr(optimizer, batch_size=128, base_batch_size=32, warmup_steps=2)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if how == "sequential":
        schedulers = [torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[2])]
    else:
        schedulers = [warm_up, decay]
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.2] if how == "sequential" else [0.2, 0.2, 0.1, 0.05])
