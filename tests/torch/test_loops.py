"""Loops that already exist: `.add` per piece, then `.finish`."""

import pytest
import torch
from models import make_data, make_loss, make_model, take_gradients, whole_gradients

from reference import assert_exact
from wholebatch import CountError, LossError, Mean, OptionError, Sum
from wholebatch.torch import Accumulator

SIZES = [4, 1, 5]


def pieces(data):
    return zip(data[0].split(SIZES), data[1].split(SIZES), strict=True)


FORMS = {
    "scalar": lambda loss, n: loss,
    "mean": lambda loss, n: Mean(loss * n, n),
    "mean, counted on the device": lambda loss, n: Mean(loss * n, torch.tensor(n)),
    "scalars": lambda loss, n: {"a": 0.25 * loss, "b": 0.75 * loss},
    "scalar and sum": lambda loss, n: {"a": 0.5 * loss, "s": Sum(loss * n / 20)},
    "with metrics": lambda loss, n: (loss, {"rows": Sum(n)}),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_pieces_added_one_by_one_give_the_gradient_of_the_whole(form):
    model, data = make_model(), make_data()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: loss_fn(data))
    accumulator = Accumulator(model)
    for x, y in pieces(data):
        accumulator.add(form(loss_fn((x, y)), len(x)), rows=len(x))
    result = accumulator.finish()
    assert_exact(take_gradients(model), whole)
    assert result.loss.item() == pytest.approx(loss_fn(data).item(), rel=1e-12)
    assert (result.rows, result.num_micro_batches) == (10, 3)


def test_finish_steps_once():
    model, twin, data = make_model(), make_model(), make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accumulator = Accumulator(model)
    for _ in range(3):
        for x, y in pieces(data):
            accumulator.add(make_loss(model)((x, y)), rows=len(x))
        assert accumulator.finish(optimizer, max_norm=0.5, scheduler=scheduler).stepped
    assert scheduler.last_epoch == 3
    raw = torch.optim.SGD(twin.parameters(), lr=0.1)
    raw_scheduler = torch.optim.lr_scheduler.StepLR(raw, 1)
    for _ in range(3):
        raw.zero_grad()
        make_loss(twin)(data).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        raw.step()
        raw_scheduler.step()
    expected = {name: p.detach().numpy() for name, p in twin.named_parameters()}
    assert_exact({name: p.detach().numpy() for name, p in model.named_parameters()}, expected)


def test_a_scalar_needs_its_rows():
    model, data = make_model(), make_data()
    with pytest.raises(LossError, match=r"tell them with \.add\(loss, rows=\.\.\.\)"):
        Accumulator(model).add(make_loss(model)(data))


def test_terms_with_two_denominators_are_for_backward():
    model, data = make_model(), make_data()
    loss = make_loss(model)(data)
    with pytest.raises(CountError, match="give counts= to .backward"):
        Accumulator(model).add({"a": loss, "b": Mean(loss * 10, 10)}, rows=10)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (-3, "rows must be at least 0, got -3"),
        (2.5, "rows must be a positive integer"),
        ("3", "rows must be"),
        (True, "rows"),
    ],
)
def test_rows_are_numbers_of_rows(rows, text):
    model, data = make_model(), make_data()
    with pytest.raises(OptionError, match=text):
        Accumulator(model).add(make_loss(model)(data), rows=rows)


def test_rows_that_are_refused_forget_the_batch_like_any_other_error():
    model, data = make_model(), make_data()
    accumulator = Accumulator(model)
    accumulator.add(make_loss(model)(data), rows=10)
    with pytest.raises(OptionError, match="rows must be at least 0, got -1"):
        accumulator.add(make_loss(model)(data), rows=-1)
    assert all(parameter.grad is None for parameter in model.parameters())
    accumulator.add(make_loss(model)(data), rows=10)
    assert accumulator.finish().num_micro_batches == 1


def test_many_pieces_of_which_some_count_nothing():
    model, data = make_model(), make_data()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: loss_fn(data))
    accumulator = Accumulator(model)
    for i in range(50):
        count = 0 if i % 4 == 0 else 3
        accumulator.add(Mean(loss_fn(data) * count, torch.tensor(count) if i % 3 else count))
    result = accumulator.finish()
    assert_exact(take_gradients(model), whole)
    assert result.loss.item() == pytest.approx(loss_fn(data).item(), rel=1e-12)


def test_finish_without_an_optimizer_counts_no_skipped_step():
    model, data = make_model(), make_data()
    accumulator = Accumulator(model)
    accumulator.add(Mean(make_loss(model)(data), 0))
    accumulator.finish()
    assert accumulator.skipped == 0
