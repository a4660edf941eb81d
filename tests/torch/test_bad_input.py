"""Every misuse gets one clear error, and leaves everything as it was."""

import numpy as np
import pytest
import torch
from models import make_data, make_loss, make_model, take_gradients, whole_gradients

from reference import assert_exact
from wholebatch import Mean, Sum, WholeBatchError
from wholebatch.torch import Accumulator, backward, check

MODEL = make_model()
DATA = make_data()


def total(piece):
    return torch.nn.functional.cross_entropy(MODEL(piece[0]), piece[1], reduction="sum")


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"micro_batch_size": 0}, ValueError, "micro_batch_size must be at least 1, got 0"),
        ({"micro_batch_size": -2}, ValueError, "micro_batch_size must be at least 1, got -2"),
        ({"micro_batch_size": 2.5}, TypeError, "micro_batch_size must be a positive integer, got 2.5 of type float"),
        ({"num_micro_batches": 0}, ValueError, "num_micro_batches must be at least 1, got 0"),
        ({"micro_batch_size": 2, "num_micro_batches": 2}, ValueError, "both micro_batch_size=2 and num_micro"),
        ({"on_nonfinite": "ignore"}, ValueError, 'on_nonfinite must be "raise", "skip" or "keep", got \'ignore\''),
    ],
)
def test_options(options, kind, text):
    with pytest.raises(kind, match=text) as caught:
        Accumulator(MODEL, **options)
    assert isinstance(caught.value, WholeBatchError)


LOSSES = {
    "a vector": (lambda b: MODEL(b[0]).sum(-1), ValueError, r"the loss must be a scalar, got shape \(5,\)"),
    "a NumPy value": (lambda b: np.float64(1.0), TypeError, r"the loss must be a scalar tensor.*of type float64"),
    "None": (lambda b: None, TypeError, "the loss must be a scalar tensor.*got None of type NoneType"),
    "a number": (lambda b: 1.0, TypeError, "got 1.0 of type float"),
    "a list": (lambda b: [total(b)], TypeError, "of type list"),
    "complex": (lambda b: total(b) * 1j, ValueError, "the loss must be real, got torch.complex128"),
    "no graph": (lambda b: total(b).detach(), ValueError, "the loss has no graph"),
    "no terms": (lambda b: {}, ValueError, "a mapping with no terms"),
    "negative count": (lambda b: Mean(total(b), -1), ValueError, "count of the loss must not be negative, got -1"),
    "count as tensor, negative": (
        lambda b: Mean(total(b), torch.tensor(-1)),
        ValueError,
        "the count of 'loss' must not be negative, got -1 in piece 1 of 2",
    ),
    "count not scalar": (
        lambda b: Mean(total(b), torch.ones(2)),
        ValueError,
        r"count.*must be a scalar, got shape \(2,\)",
    ),
    "count a list": (lambda b: Mean(total(b), [1, 2]), ValueError, r"count.*must be a number or a scalar tensor"),
    "count with a graph": (
        lambda b: Mean(total(b), MODEL[0].weight.square().sum()),
        ValueError,
        "the count of the loss requires grad",
    ),
    "total not scalar": (lambda b: Mean(MODEL(b[0]), 2), ValueError, r"the total of the loss must be a scalar"),
    "total a number": (lambda b: Mean(1.0, 2), TypeError, "the total of the loss must be a scalar tensor, got"),
    "a key that is no string": (lambda b: {1: total(b)}, TypeError, "terms are named by strings, got the key 1 of"),
    "a term of no use": (
        lambda b: {"a": None},
        TypeError,
        "term 'a' must be a scalar tensor, a Mean or a Sum, got None",
    ),
    "a metric of no use": (lambda b: (total(b), {"a": "x"}), TypeError, "metric 'a' must be a scalar tensor"),
    "a metric key": (lambda b: (total(b), {2: 1.0}), TypeError, "metrics are named by strings"),
    "a pair without metrics": (lambda b: (total(b), total(b)), TypeError, "of type tuple"),
}


@pytest.mark.parametrize(("loss_fn", "kind", "text"), LOSSES.values(), ids=LOSSES)
def test_losses(loss_fn, kind, text):
    with pytest.raises(kind, match=text) as caught:
        backward(MODEL, loss_fn, DATA, micro_batch_size=5)
    assert isinstance(caught.value, WholeBatchError)
    assert all(parameter.grad is None for parameter in MODEL.parameters())


def test_no_grad_is_named_as_the_reason_for_a_missing_graph():
    with torch.no_grad(), pytest.raises(ValueError, match="gradients are switched off by torch.no_grad"):
        backward(MODEL, make_loss(MODEL), DATA)


def in_turn(*losses):
    given = iter(losses)
    return lambda piece: next(given)(piece)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (lambda b: {"a": total(b)}, lambda b: {"b": total(b)}, "terms differ between pieces: '[ab]' is in piece"),
        (lambda b: {"a": total(b)}, lambda b: {"a": total(b), "z": total(b)}, "'z' is in piece 2 and not in piece 1"),
        (lambda b: {"a": total(b), "z": total(b)}, lambda b: {"a": total(b)}, "'z' is in piece 1 and not in piece 2"),
        (lambda b: Mean(total(b), 5), total, "'loss' is divided by its own count in piece 1 and by rows in piece 2"),
        (lambda b: Sum(total(b)), lambda b: Mean(total(b), 1), "by nothing in piece 1 and by its own count in piece 2"),
        (lambda b: (total(b), {"m": 1}), total, "metrics differ between pieces: 'm' is in piece 1"),
    ],
)
def test_pieces_that_disagree(first, second, text):
    with pytest.raises(ValueError, match=text):
        backward(MODEL, in_turn(first, second), DATA, micro_batch_size=5)


def two_means(b):
    return {"a": Mean(total(b), 5), "b": Mean(total(b), torch.tensor(3))}


@pytest.mark.parametrize(
    ("loss_fn", "counts", "text"),
    [
        (
            two_means,
            None,
            r"terms 'a', 'b' are divided by different counts.*give counts= .*\{'a': \.\.\., 'b': \.\.\.\}",
        ),
        (
            two_means,
            lambda b: {"a": 5},
            "counts= names 'a', but the terms of the loss that have a count of their own are 'a', 'b'",
        ),
        (
            two_means,
            lambda b: {"a": 5, "b": 4},
            "counts= says that the batch holds 8 for term 'b', but the loss counted 6",
        ),
        (two_means, lambda b: {"a": torch.tensor(2), "b": 3}, "holds 4 for term 'a', but the loss counted 10"),
        (two_means, lambda b: {"a": -5, "b": 3}, "the count of term 'a' in counts= must not be negative, got -5"),
        (two_means, lambda b: {"a": "five", "b": 3}, "the count of term 'a' in counts= must be a number"),
        (two_means, lambda b: {"a": 5, "b": 3, "c": 1}, "counts= names 'a', 'b', 'c', but the terms"),
        (lambda b: Sum(total(b)), lambda b: {"loss": 5}, "counts= names 'loss', but the terms of the loss .* are none"),
        (total, lambda b: {"loss": 4}, "holds 8 for term 'loss', but the loss counted 10"),
        (two_means, 5, "counts must be a function of a piece, got int"),
        (two_means, lambda b: {5: 3}, "counts= are named by strings"),
        (
            two_means,
            in_turn(lambda b: {"a": 5, "b": 3}, lambda b: {"a": 5}),
            "counts= names a, b for piece 1 and a for",
        ),
    ],
)
def test_counts(loss_fn, counts, text):
    with pytest.raises(ValueError, match=text) as caught:
        backward(MODEL, loss_fn, DATA, counts=counts, micro_batch_size=5)
    assert isinstance(caught.value, WholeBatchError)


STEPS = {
    "no optimizer": (
        {"optimizer": "sgd"},
        TypeError,
        "optimizer must be a torch optimizer or a sequence of them, got str",
    ),
    "no scheduler": ({"scheduler": 3}, TypeError, "scheduler must be a torch scheduler or a sequence of them, got int"),
    "max_norm 0": ({"max_norm": 0}, ValueError, "max_norm must be a positive number, got 0"),
    "max_norm not a number": ({"max_norm": float("nan")}, ValueError, "max_norm must be a positive number, got nan"),
    "scaler text": ({"scaler": "fp16"}, TypeError, "scaler must be a GradScaler, got str"),
    "several scalers": ({"scaler": [torch.amp.GradScaler("cpu")]}, TypeError, "scaler must be a GradScaler, got list"),
    "max_norm text": ({"max_norm": "1"}, TypeError, "max_norm must be a positive number, got '1'"),
}


@pytest.mark.parametrize(("wrong", "kind", "text"), STEPS.values(), ids=STEPS)
def test_steps_are_refused_before_any_work(wrong, kind, text):
    given = {"optimizer": torch.optim.SGD(MODEL.parameters(), 0.1)} | wrong
    with pytest.raises(kind, match=text):
        Accumulator(MODEL).step(lambda piece: pytest.fail("the loss was called"), DATA, **given)


def test_a_scheduler_needs_an_optimizer():
    accumulator = Accumulator(MODEL)
    accumulator.add(make_loss(MODEL)(DATA), rows=10)
    with pytest.raises(ValueError, match="a scheduler was given without an optimizer"):
        accumulator.finish(scheduler=torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(MODEL.parameters(), 0.1)))
    accumulator.discard()


def test_finish_with_nothing_added():
    with pytest.raises(ValueError, match=r"nothing was added: call \.add\(loss\)"):
        Accumulator(MODEL).finish()


def test_backward_while_pieces_are_pending():
    accumulator = Accumulator(MODEL)
    accumulator.add(make_loss(MODEL)(DATA), rows=10)
    with pytest.raises(ValueError, match="pieces added with .add are still pending"):
        accumulator.backward(make_loss(MODEL), DATA)
    accumulator.discard()


@pytest.mark.parametrize("function", [None, "mse"])
def test_a_loss_function_has_to_be_one(function):
    with pytest.raises(TypeError, match="loss_fn must be a function of a piece, got"):
        backward(MODEL, function, DATA)


def test_a_gradient_is_summed_by_one_accumulator_at_a_time():
    model, data = make_model(), make_data()
    first, second = Accumulator(model), Accumulator(model)
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    first.add(make_loss(model)(data), rows=10)
    for refused in (
        lambda: second.add(make_loss(model)(data), rows=10),
        lambda: second.backward(make_loss(model), data),
        lambda: check(model, make_loss(model), data),
    ):
        with pytest.raises(ValueError, match=r"still being summed by another Accumulator: call its \.finish\(\)"):
            refused()
    first.finish()
    assert_exact(take_gradients(model), whole)
    second.backward(make_loss(model), data)
    assert_exact(take_gradients(model), whole)


def test_two_accumulators_in_turns_may_not_pass_through_each_others_networks():
    player, judge = torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 1).double()
    x, _ = make_data()
    for_judge, for_player = Accumulator(judge), Accumulator(player)
    for_judge.add(judge(player(x).detach()).square().mean(), rows=10)
    with pytest.raises(ValueError, match="of shape .* is still being summed by another Accumulator"):
        for_player.add(judge(player(x)).mean(), rows=10)
    judge.requires_grad_(False)
    for_player.add(judge(player(x)).mean(), rows=10)
    judge.requires_grad_(True)
    for_judge.finish()
    for_player.finish()
    assert_exact(take_gradients(judge), whole_gradients(judge, lambda: judge(player(x).detach()).square().mean()))
    taken = take_gradients(player)
    assert_exact(taken, whole_gradients(player, lambda: judge(player(x)).mean()))


def test_a_lost_accumulator_does_not_stand_in_the_way():
    model, data = make_model(), make_data()
    lost = Accumulator(model)
    lost.add(make_loss(model)(data), rows=10)
    del lost
    model.zero_grad()
    assert backward(model, make_loss(model), data).loss.isfinite()
