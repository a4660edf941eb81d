"""Zero counts, large counts, and counts in every form."""

import numpy as np
import pytest
import torch
from models import make_data, make_loss, make_model, take_gradients, whole_gradients

from reference import assert_exact
from wholebatch import Mean, Sum
from wholebatch.torch import Accumulator, backward


def masked(model, as_count):
    """The mean over the rows whose label is not negative; NaN where there are none, as many losses are."""

    def loss_fn(piece):
        x, y = piece
        kept = (y >= 0).sum()
        mean = torch.nn.functional.cross_entropy(model(x), y, ignore_index=-1)
        return Mean(mean * kept, as_count(kept))

    return loss_fn


COUNTS = {
    "tensor": lambda kept: kept,
    "int": int,
    "float": float,
    "float tensor": lambda kept: kept.to(torch.float32),
    "bfloat16 tensor": lambda kept: kept.to(torch.bfloat16),
    "NumPy": lambda kept: np.int64(int(kept)),
    "mixed": lambda kept: kept if kept > 2 else int(kept),
}


@pytest.mark.parametrize("as_count", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_a_piece_that_counts_nothing_contributes_nothing(as_count, size):
    model, (x, y) = make_model(), make_data()
    y[:4] = -1
    whole = whole_gradients(model, lambda: torch.nn.functional.cross_entropy(model(x), y, ignore_index=-1))
    result = backward(model, masked(model, as_count), (x, y), micro_batch_size=size)
    assert_exact(take_gradients(model), whole)
    assert torch.isfinite(result.loss)
    assert result.count == 6


@pytest.mark.parametrize("as_count", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("size", [3, 10])
def test_a_batch_that_counts_nothing_has_loss_zero_and_zero_gradients(as_count, size):
    model, (x, y) = make_model(), make_data()
    y[:] = -1
    result = backward(model, masked(model, as_count), (x, y), micro_batch_size=size)
    assert result.loss == 0
    assert result.count == 0
    assert not result.stepped
    assert not any(p.grad.any() for p in model.parameters())
    before = model[0].weight.grad = torch.ones_like(model[0].weight)
    model[2].weight.grad = None
    backward(model, masked(model, as_count), (x, y), micro_batch_size=size)
    assert model[0].weight.grad is before
    assert before.all()
    model[0].weight.grad = torch.zeros_like(before)
    gradients = take_gradients(model)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert not any(gradient.any() for gradient in gradients.values())


def test_a_batch_that_counts_nothing_takes_no_step():
    model, (x, y) = make_model(), make_data()
    y[:] = -1
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accumulator = Accumulator(model, micro_batch_size=3)
    before = [p.detach().clone() for p in model.parameters()]
    result = accumulator.step(masked(model, lambda kept: kept), (x, y), optimizer, scheduler=scheduler, max_norm=1.0)
    assert (result.stepped, accumulator.skipped, scheduler.last_epoch) == (False, 1, 0)
    assert not optimizer.state
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_piece_without_a_graph_may_count_nothing():
    model, (x, y) = make_model(), make_data()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: loss_fn((x[:5], y[:5])))
    losses = iter([lambda b: Mean(loss_fn(b) * 5, 5), lambda b: Mean(torch.zeros(()), 0)])
    result = backward(model, lambda b: next(losses)(b), (x, y), micro_batch_size=5)
    assert_exact(take_gradients(model), whole)
    assert result.count == 5


def test_a_sum_always_counts():
    model, data = make_model(), make_data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_fn = make_loss(model)
    result = Accumulator(model, micro_batch_size=5).step(
        lambda b: {"nothing": Mean(loss_fn(b), 0), "sum": Sum(loss_fn(b))}, data, optimizer
    )
    assert result.stepped
    assert result.count == {"nothing": 0, "sum": 1}


@pytest.mark.parametrize("as_count", [int, torch.tensor], ids=["int", "tensor"])
def test_integer_counts_stay_integers_beyond_float32(as_count):
    model, data = make_model(), make_data()
    large = 2**24
    loss_fn = make_loss(model)
    result = backward(model, lambda b: Mean(loss_fn(b), as_count(large + 1)), data, micro_batch_size=5)
    assert result.count == 2 * large + 2


def test_small_counts_do_not_overflow_their_type():
    model, data = make_model(), make_data()
    loss_fn = make_loss(model)
    result = backward(model, lambda b: Mean(loss_fn(b), torch.tensor(200, dtype=torch.uint8)), data, micro_batch_size=2)
    assert result.count == 1000


def test_counts_of_the_library_and_of_the_loss_may_be_floats_in_another_order():
    model, (x, y) = make_model(), make_data()
    weights = torch.rand(10, generator=torch.Generator().manual_seed(0))
    per_row = torch.nn.CrossEntropyLoss(reduction="none")

    def loss_fn(piece):
        x, y, w = piece
        losses = per_row(model(x), y)
        return {"w": Mean((losses * w).sum(), w.sum()), "m": Mean.of(losses)}

    def objective():
        losses = per_row(model(x), y)
        return (losses * weights).sum() / weights.double().sum() + losses.mean()

    whole = whole_gradients(model, objective)
    counts = lambda piece: {"w": piece[2].flip(0).sum(), "m": len(piece[0])}  # noqa: E731
    backward(model, loss_fn, (x, y, weights), counts=counts, micro_batch_size=3)
    assert_exact(take_gradients(model), whole, tolerance=1e-6)


def test_one_term_may_have_its_count_given_too():
    model, data = make_model(), make_data()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: loss_fn(data))
    for counts in (lambda b: len(b[0]), lambda b: {"loss": torch.tensor(len(b[0]))}):
        backward(model, lambda b: Mean(loss_fn(b) * len(b[0]), len(b[0])), data, counts=counts, micro_batch_size=4)
        assert_exact(take_gradients(model), whole)


def test_metrics_are_reported_over_the_whole_batch_and_not_differentiated():
    model, (x, y) = make_model(), make_data()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: loss_fn((x, y)))

    def with_metrics(piece):
        right = model(piece[0]).argmax(-1) == piece[1]
        logits = model(piece[0])
        return loss_fn(piece), {
            "accuracy": right.double().mean(),
            "hits": Sum(right.sum()),
            "logit": Mean.of(logits),
            "plain": len(piece[0]),
            "ratio": Mean(float(right.sum()), len(right)),
            "number": Sum(2),
            "weighted": Mean(logits.sum(), logits.square().sum()),
        }

    metrics = backward(model, with_metrics, (x, y), micro_batch_size=4).metrics
    assert_exact(take_gradients(model), whole)
    right = model(x).argmax(-1) == y
    assert metrics["accuracy"].item() == pytest.approx(right.double().mean().item(), rel=1e-12)
    assert metrics["hits"] == right.sum()
    assert metrics["logit"].item() == pytest.approx(model(x).mean().item(), rel=1e-12)
    assert metrics["weighted"].item() == pytest.approx((model(x).sum() / model(x).square().sum()).item(), rel=1e-12)
    assert metrics["plain"].item() == pytest.approx((4 * 4 + 3 * 3 + 3 * 3) / 10)
    assert metrics["ratio"].item() == pytest.approx(right.double().mean().item())
    assert metrics["number"] == 6
    assert not any(metric.requires_grad for metric in metrics.values())


@pytest.mark.parametrize("declared", [int, torch.tensor], ids=["declared int", "declared tensor"])
@pytest.mark.parametrize("counted", [int, torch.tensor], ids=["counted int", "counted tensor"])
def test_seeds_keep_the_precision_of_the_loss(declared, counted):
    model, data = make_model(), make_data()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: loss_fn(data))
    backward(
        model,
        lambda b: Mean(loss_fn(b) * len(b[0]), counted(len(b[0]))),
        data,
        counts=lambda b: declared(len(b[0])),
        micro_batch_size=3,
    )
    assert_exact(take_gradients(model), whole)


def test_a_total_beside_a_count_of_zero_is_left_out():
    model, (x, y) = make_model(), make_data()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: loss_fn((x[5:], y[5:])))
    counts = iter([0, 5])
    result = backward(model, lambda b: Mean(loss_fn(b) * 5, torch.tensor(next(counts))), (x, y), micro_batch_size=5)
    assert_exact(take_gradients(model), whole)
    assert result.loss.item() == pytest.approx(loss_fn((x[5:], y[5:])).item())


def spoilt(model):
    """A masked mean whose gradient is NaN where the mask is empty, because it was divided by 0 on the way."""

    def loss_fn(piece):
        x, mask = piece
        n = mask.sum()
        return Mean((model(x).square().sum(-1) * mask).sum() / n * n, n)

    return loss_fn


def test_a_gradient_that_a_piece_without_a_count_has_spoilt_is_seen():
    model, (x, _) = make_model(), make_data()
    mask = torch.ones(10, dtype=torch.float64)
    mask[:5] = 0
    model[0].weight.grad = before = torch.ones_like(model[0].weight)
    with pytest.raises(ArithmeticError, match="piece 1 of 2, which counts nothing, is nan, and so is its gradient"):
        backward(model, spoilt(model), (x, mask), micro_batch_size=5)
    assert model[0].weight.grad is before
    accumulator = Accumulator(model, micro_batch_size=5, on_nonfinite="skip")
    accumulator.backward(spoilt(model), (x, mask))
    assert accumulator.skipped == 1
    assert torch.equal(before, torch.ones_like(before))


@pytest.mark.parametrize("size", [5, 10])
def test_a_batch_without_a_count_has_zero_gradients_whatever_its_pieces_have(size):
    model, (x, _) = make_model(), make_data()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    result = backward(model, spoilt(model), (x, torch.zeros(10, dtype=torch.float64)), micro_batch_size=size)
    assert result.loss == 0
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert torch.equal(model[0].bias.grad, torch.zeros_like(model[0].bias))


def test_keep_keeps_a_count_that_is_not_a_number():
    model, data = make_model(), make_data()
    nan = torch.tensor(float("nan"))
    result = backward(model, lambda b: Mean(make_loss(model)(b), nan), data, micro_batch_size=5, on_nonfinite="keep")
    assert result.loss.isnan()
    assert model[0].weight.grad.isnan().all()


def test_a_piece_without_a_graph_is_judged_by_its_count():
    model, data = make_model(), make_data()
    loss_fn = make_loss(model)

    def with_count(count):
        losses = iter([Mean(torch.zeros(()), torch.tensor(count)), None])
        return lambda b: next(losses) or Mean(loss_fn(b) * 5, torch.tensor(5))

    assert backward(model, with_count(0), data, micro_batch_size=5).count == 5
    with pytest.raises(ValueError, match="the loss of piece 1 has no graph"):
        backward(model, with_count(3), data, micro_batch_size=5)


def test_pieces_may_count_in_different_types():
    model, data = make_model(), make_data()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: loss_fn(data) * 10 / 7.5)
    for kinds in ([torch.tensor(5), torch.tensor(2.5)], [torch.tensor(5), 2.5], [5, torch.tensor(2.5)]):
        counts = iter(kinds)
        result = backward(model, lambda b: Mean(loss_fn(b) * 5, next(counts)), data, micro_batch_size=5)  # noqa: B023
        assert_exact(take_gradients(model), whole)
        assert result.count == 7.5
        assert result.loss.item() == pytest.approx(loss_fn(data).item() * 10 / 7.5)


def test_a_term_may_be_a_constant_in_the_first_piece():
    model, data = make_model(), make_data()
    loss_fn = make_loss(model)
    terms = iter([torch.tensor(0), torch.tensor(0.0144, dtype=torch.float64)])
    result = backward(model, lambda b: {"nll": loss_fn(b), "aux": Sum(next(terms))}, data, micro_batch_size=5)
    assert result.terms["aux"].item() == 0.0144


def test_numbers_in_metrics_keep_their_digits():
    model, data = make_model(), make_data()
    large = 2**25 + 1
    metrics = {"sum": Sum(large), "float": Mean(0.1, 1), "mean": 0.1}
    result = backward(model, lambda b: (make_loss(model)(b), metrics), data, micro_batch_size=5)
    assert result.metrics["sum"].item() == 2 * large
    assert result.metrics["float"].item() == result.metrics["mean"].item() == 0.1


@pytest.mark.parametrize(("declared", "ok"), [(1000000, True), (1000001, False), (1000000.2, True), (1000100.5, False)])
def test_declared_counts_have_to_agree(declared, ok):
    model, data = make_model(), make_data()
    loss_fn = lambda b: Mean(make_loss(model)(b), 1000000.0)  # noqa: E731
    if ok:
        backward(model, loss_fn, data, counts=lambda b: declared)
    else:
        with pytest.raises(ValueError, match="both must count the same items"):
            backward(model, loss_fn, data, counts=lambda b: declared)


def test_counts_may_name_scalar_terms_too():
    model, (x, y) = make_model(), make_data()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: loss_fn((x, y)) + model(x).square().sum() / 3 + model(x).sum() / 7)

    def terms(piece):
        share = len(piece[0]) / 10
        a, b = model(piece[0]).square().sum(), model(piece[0]).sum()
        return {"row": loss_fn(piece), "a": Mean(a, 3 * share), "b": Mean(b, 7 * share)}

    def counts(piece):
        return {"row": len(piece[0]), "a": 3 * len(piece[0]) / 10, "b": 7 * len(piece[0]) / 10}

    result = backward(model, terms, (x, y), micro_batch_size=4, counts=counts)
    assert_exact(take_gradients(model), whole)
    assert result.count["row"] == 10
