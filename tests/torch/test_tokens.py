"""The language-model loss as a ratio, and the refusal of its common misreading."""

from dataclasses import dataclass

import pytest
import torch
from models import take_gradients, whole_gradients

from reference import assert_exact
from wholebatch import LossError, Mean
from wholebatch.torch import Accumulator, Window, backward, token_mean

VOCABULARY = 7


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 5, dtype=torch.float64)
        self.head = torch.nn.Linear(5, VOCABULARY, dtype=torch.float64)

    def forward(self, ids):
        return self.head(self.embedding(ids).cumsum(-2).tanh())


def make_tokens(rows=6, length=8):
    ids = torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for row in range(rows):
        labels[row, length - row :] = -100  # row 0 has no padding
    return {"input_ids": ids, "labels": labels}


def mean_over_tokens(logits, labels, shift=True):
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_token_mean_splits_exactly(shift, size):
    model, batch = Tiny(), make_tokens()
    whole = whole_gradients(model, lambda: mean_over_tokens(model(batch["input_ids"]), batch["labels"], shift))
    result = backward(
        model, lambda b: token_mean(model(b["input_ids"]), b["labels"], shift=shift), batch, micro_batch_size=size
    )
    assert_exact(take_gradients(model), whole)
    labels = batch["labels"][:, 1:] if shift else batch["labels"]
    assert result.count == (labels != -100).sum()


def test_the_shift_moves_the_count():
    logits, labels = torch.zeros(1, 4, VOCABULARY), torch.tensor([[1, 2, 3, -100]])
    assert token_mean(logits, labels).count == 2
    assert token_mean(logits, labels, shift=False).count == 3
    assert token_mean(logits, labels.abs() % 4, ignore_index=2).count == 2


def test_one_position_predicts_nothing():
    loss = token_mean(torch.zeros(2, 1, VOCABULARY), torch.ones(2, 1, dtype=torch.long))
    assert (loss.total, loss.count) == (0, 0)


def test_low_precision_logits_are_summed_in_float32():
    assert token_mean(torch.zeros(1, 3, VOCABULARY, dtype=torch.bfloat16), torch.ones(1, 3).long()).total.dtype == (
        torch.float32
    )


def test_shapes_that_do_not_match_are_named():
    with pytest.raises(LossError, match=r"logits \(2, 3, 7\) and labels \(2, 4\) do not match"):
        token_mean(torch.zeros(2, 3, VOCABULARY), torch.zeros(2, 4))


def scalar_loss(model):
    return lambda b: mean_over_tokens(model(b["input_ids"]), b["labels"])


@pytest.mark.parametrize(
    "batch",
    [make_tokens(), {"nested": make_tokens()}, Window([make_tokens(), make_tokens()])],
    ids=["dict", "nested", "window"],
)
@pytest.mark.parametrize("size", [None, 2])
def test_a_scalar_loss_over_ignored_labels_is_refused(batch, size):
    model = Tiny()
    loss_fn = scalar_loss(model)
    with pytest.raises(LossError, match=r"mean over tokens.*Return token_mean\(logits, labels\) or Mean\("):
        Accumulator(model, micro_batch_size=size).backward(lambda b: loss_fn(b.get("nested", b)), batch)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_refused_split_would_have_been_wrong():
    model, batch = Tiny(), make_tokens()
    whole = whole_gradients(model, lambda: scalar_loss(model)(batch))
    for ids, labels in zip(batch["input_ids"].split(3), batch["labels"].split(3), strict=True):
        (scalar_loss(model)({"input_ids": ids, "labels": labels}) / 2).backward()
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(take_gradients(model), whole)


def test_a_mean_over_ignored_labels_and_a_scalar_without_them_are_accepted():
    model, batch = Tiny(), make_tokens()
    backward(model, lambda b: Mean(scalar_loss(model)(b), 1), batch)
    backward(model, lambda b: token_mean(model(b["input_ids"]), b["labels"]), batch, micro_batch_size=2)
    batch["labels"] = batch["input_ids"]
    backward(model, scalar_loss(model), batch, micro_batch_size=2)


@dataclass
class Tokens:
    input_ids: torch.Tensor
    labels: torch.Tensor


def test_labels_are_found_in_dataclasses_too():
    model, batch = Tiny(), make_tokens()
    with pytest.raises(LossError, match="token_mean"):
        backward(model, lambda b: mean_over_tokens(model(b.input_ids), b.labels), Tokens(**batch))


def test_a_scalar_beside_a_mean_is_taken_at_its_word():
    """Who returns a Mean knows that there are tokens to count."""
    model, batch = Tiny(), make_tokens()

    def loss_fn(b):
        logits = model(b["input_ids"])
        return {"nll": token_mean(logits, b["labels"]), "size": logits.square().mean()}

    def objective():
        logits = model(batch["input_ids"])
        return mean_over_tokens(logits, batch["labels"]) + logits.square().mean()

    whole = whole_gradients(model, objective)
    backward(model, loss_fn, batch, micro_batch_size=4)
    assert_exact(take_gradients(model), whole)
    with pytest.raises(LossError, match="token_mean"):
        backward(model, lambda b: {"loss": scalar_loss(model)(b)}, batch, micro_batch_size=4)
