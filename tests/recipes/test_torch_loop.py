"""The loop with accumulation ends where plain whole batches end; the textbook's loop does not."""

import copy
import math

import pytest
import torch
from torch import nn

from reference import EXACT, assert_exact
from wholebatch import OptionError
from wholebatch.recipes.torch_loop import (
    create_data,
    main,
    train_standard,
    train_with_accumulation,
    train_with_accumulation_and_amp,
    whole_batches,
)

LR, EPOCHS, STEPS = 0.5, 3, 4


@pytest.fixture
def data():
    """54 rows in micro-batches of 8: windows of four, and of three with a short one at the end."""
    torch.manual_seed(0)
    return [(x.double(), y) for x, y in create_data(54, 5, 3, 8)]


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def weights(model):
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def plain_whole_batches(data, max_norm=None):
    """Nothing of the library: whole batches, and the mean loss over rows of each epoch."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    means = []
    for _ in range(EPOCHS):
        losses = []
        for start in (0, 32):
            optimizer.zero_grad()
            each = nn.functional.cross_entropy(model(x[start : start + 32]), y[start : start + 32], reduction="none")
            each.mean().backward()
            if max_norm:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            losses.append(each.detach())
        means.append(torch.cat(losses).mean().item())
    return model, means


def textbook(data, max_norm=None):
    """The usual code: every micro-batch is divided by the full number, and what is left over makes a step."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(data, start=1):
            (nn.functional.cross_entropy(model(x), y) / STEPS).backward()
            if max_norm:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            if i % STEPS == 0 or i == len(data):
                optimizer.step()
                optimizer.zero_grad()
    return model


@pytest.mark.parametrize("max_norm", [None, 0.3])
def test_accumulation_ends_where_whole_batches_end(data, max_norm):
    meant, losses = plain_whole_batches(data, max_norm)
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(weights(meant), weights(make_model()), 1e-3)
    model = make_model()
    history = train_with_accumulation(model, data, LR, EPOCHS, STEPS, max_norm=max_norm)
    assert_exact(weights(model), weights(meant))
    assert history == pytest.approx(losses, rel=EXACT)

    model = make_model()
    history = train_standard(model, whole_batches(data, STEPS), LR, EPOCHS, max_norm=max_norm)
    assert_exact(weights(model), weights(meant))
    assert history == pytest.approx(losses, rel=EXACT)


@pytest.mark.parametrize("max_norm", [None, 0.3])
def test_the_textbook_loop_does_not(data, max_norm):
    """Short window by the full number; clipped by micro-batch."""
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(weights(textbook(data, max_norm)), weights(plain_whole_batches(data, max_norm)[0]), 1e-3)


def test_in_full_windows_it_does(data):
    full = data[:4]
    model = make_model()
    train_with_accumulation(model, full, LR, EPOCHS, STEPS)
    assert_exact(weights(textbook(full)), weights(model))


def test_standard_training_steps_at_each_element_and_weighs_losses_by_rows(data):
    model = make_model()
    losses = train_standard(model, data[-2:], 1e-30, 1)
    each = [nn.functional.cross_entropy(make_model()(x), y).item() for x, y in data[-2:]]
    assert losses == pytest.approx([(8 * each[0] + 6 * each[1]) / 14], rel=EXACT)


def test_mixed_precision_takes_the_same_steps(data, monkeypatch):
    """Autocast leaves float64 alone, so that the rest of the path can be compared exactly."""
    stepped, updated = [], []
    step, update = torch.amp.GradScaler.step, torch.amp.GradScaler.update
    monkeypatch.setattr(torch.amp.GradScaler, "step", lambda *args: stepped.append(1) or step(*args))
    monkeypatch.setattr(torch.amp.GradScaler, "update", lambda *args: updated.append(1) or update(*args))
    meant, losses = plain_whole_batches(data, max_norm=0.3)
    model = make_model()
    history = train_with_accumulation_and_amp(model, data, LR, EPOCHS, STEPS, max_norm=0.3)
    assert_exact(weights(model), weights(meant))
    assert history == pytest.approx(losses, rel=EXACT)
    assert len(stepped) == len(updated) == 2 * EPOCHS, "once per window"


def test_mixed_precision_in_float32_is_near_and_not_the_same(data):
    single = [(x.float(), y) for x, y in data]
    model, mixed = make_model().float(), make_model().float()
    losses = train_with_accumulation(model, single, LR, EPOCHS, STEPS)
    mixed_losses = train_with_accumulation_and_amp(mixed, single, LR, EPOCHS, STEPS)
    assert_exact(weights(mixed), weights(model), tolerance=5e-3)  # float16 keeps three digits
    assert mixed_losses == pytest.approx(losses, rel=5e-3)
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(weights(mixed), weights(model), tolerance=1e-6)


def test_data_has_classes_and_a_short_last_micro_batch():
    torch.manual_seed(0)
    data = create_data(10, 5, 3, 4)
    assert [tuple(x.shape) for x, _ in data] == [(4, 5), (4, 5), (2, 5)]
    assert [tuple(y.shape) for _, y in data] == [(4,), (4,), (2,)]
    assert all(y.dtype == torch.int64 and 0 <= y.min() <= y.max() < 3 for _, y in data)
    assert [len(x) for x, _ in create_data(8, 5, 3, 4)] == [4, 4]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_main_compares_the_same_data_and_says_that_they_agree(capsys, dtype):
    assert main(dtype=dtype)
    said = capsys.readouterr().out
    assert said.count("they agree") == 2
    assert "NOT" not in said
    rows = [line.split() for line in said.splitlines() if line.strip()[:1].isdigit()]
    assert [int(epoch) for epoch, *_ in rows] == [1, 2, 3, 4, 5]
    assert all(math.isclose(float(one), float(other), abs_tol=2e-6) for _, one, other in rows)


def test_main_says_when_they_do_not_agree(capsys, monkeypatch):
    from wholebatch.recipes import torch_loop

    right = torch_loop.train_with_accumulation
    monkeypatch.setattr(
        torch_loop, "train_with_accumulation", lambda model, data, lr, *rest: right(model, data, 1.01 * lr, *rest)
    )
    assert not main()
    assert "they do NOT agree" in capsys.readouterr().out


def test_a_dtype_that_nothing_can_be_compared_in_is_refused():
    with pytest.raises(OptionError, match="dtype must be float32 or float64, got 'float16'"):
        main(dtype="float16")


def test_the_model_that_is_given_is_the_one_that_is_trained(data):
    model = make_model()
    start = copy.deepcopy(model)
    train_with_accumulation(model, data, LR, 1, 2)
    assert not torch.equal(model[0].weight, start[0].weight)
    assert all(parameter.grad is None for parameter in model.parameters())
