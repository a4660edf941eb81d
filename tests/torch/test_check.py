"""`check` tells exact splits from wrong ones, and leaves the model as it was."""

import pytest
import torch
from models import make_data, make_loss, make_model
from test_tokens import Tiny, make_tokens, mean_over_tokens
from torch import nn

from wholebatch import BatchError, Mean, Sum
from wholebatch.torch import Window, check, token_mean


def single():
    return make_model().float(), (make_data()[0].float(), make_data()[1])


SOUND = {
    "scalar": lambda model: make_loss(model),
    "mean": lambda model: lambda b: Mean.of(nn.functional.cross_entropy(model(b[0]), b[1], reduction="none")),
    "sum": lambda model: lambda b: Sum(nn.functional.cross_entropy(model(b[0]), b[1], reduction="sum")),
}

WRONG = {
    "a sum read as a mean": lambda model: lambda b: nn.functional.cross_entropy(model(b[0]), b[1], reduction="sum"),
    "a mean given as a total": lambda model: lambda b: Mean(make_loss(model)(b), len(b[0])),
    "rows that see each other": lambda model: lambda b: model(b[0] - b[0].mean(0)).square().mean(),
    "a weighted mean as a scalar": lambda model: (
        lambda b: nn.functional.cross_entropy(
            model(b[0]), b[1], weight=torch.tensor([1.0, 5.0, 25.0], dtype=b[0].dtype)
        )
    ),
}


@pytest.mark.parametrize("loss", SOUND.values(), ids=SOUND)
def test_sound_losses_are_exact_in_float64(loss):
    model, data = single()
    report = check(model, loss(model), data)
    assert report.exact
    assert report.dtype == "float64"
    assert report.error <= report.tolerance == 1e-12
    assert set(report.cuts) == {2, 3, 7}
    assert report.parameters.keys() == dict(model.named_parameters()).keys()
    assert str(report).startswith("exact: ")


@pytest.mark.parametrize("loss", WRONG.values(), ids=WRONG)
def test_wrong_losses_are_not(loss):
    model, data = single()
    report = check(model, loss(model), data, micro_batch_size=4)
    assert not report.exact
    assert report.error > 1e-3
    assert report.error == max(report.parameters.values()) == max(report.cuts.values())
    assert str(report).startswith("NOT exact: ")
    assert next(iter(report.parameters)) in str(report), "the worst parameter is shown"


def test_a_mean_over_tokens_is_found_out_and_its_ratio_is_exact():
    model, batch = Tiny(), make_tokens()
    assert not check(model, lambda b: mean_over_tokens(model(b["input_ids"]), b["labels"]), batch).exact
    assert check(model, lambda b: token_mean(model(b["input_ids"]), b["labels"]), batch).exact


def test_batch_statistics_are_found_out_and_a_split_that_fails_is_told():
    model, data = single()
    model = nn.Sequential(model, nn.BatchNorm1d(3))
    report = check(model, make_loss(model), data)
    assert not report.exact
    assert 1e-3 < report.cuts[2] < float("inf")
    assert report.cuts[7] == float("inf")
    assert "7 pieces: ValueError: Expected more than 1 value per channel" in str(report)


def test_the_model_is_untouched():
    model, data = single()
    model = nn.Sequential(model, nn.BatchNorm1d(3), nn.Dropout(0.1))
    gradient = torch.ones_like(model[0][0].weight)
    model[0][0].weight.grad = gradient
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = [t.data_ptr() for t in model.state_dict().values()]
    random_state = torch.get_rng_state()
    check(model, make_loss(model), data)
    assert [t.data_ptr() for t in model.state_dict().values()] == tensors
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor, state[name])
    assert model[0][0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert model[0][2].bias.grad is None
    assert torch.equal(torch.get_rng_state(), random_state)


def test_leaves_outside_the_model_are_untouched():
    model, other = make_model(0), make_model(1)
    data = make_data()
    report = check(model, lambda b: nn.functional.cross_entropy(model(b[0]) + other(b[0]), b[1]), data)
    assert report.exact
    assert all(p.grad is None for p in [*model.parameters(), *other.parameters()])


def test_a_loss_that_insists_on_its_precision_is_checked_in_it():
    model, data = single()

    def loss_fn(piece):
        assert piece[0].dtype == torch.float32, "half of a fused kernel"
        return make_loss(model)(piece)

    report = check(model, loss_fn, data)
    assert report.exact
    assert report.dtype in ("float32", "float64")


def test_a_model_that_computes_in_less_is_judged_by_what_it_computes_in():
    model, data = single()
    narrow = nn.Linear(3, 3)

    def loss_fn(piece):
        logits = nn.functional.linear(model(piece[0]).bfloat16(), narrow.weight.bfloat16())
        return nn.functional.cross_entropy(logits, piece[1])

    report = check([model, narrow], loss_fn, data, micro_batch_size=2)
    assert report.dtype == "bfloat16"
    assert report.exact
    assert 1e-12 < report.error < report.tolerance


def test_a_loss_that_fails_fails_with_its_own_error():
    model, data = single()
    with pytest.raises(ZeroDivisionError):
        check(model, lambda b: 1 / 0, data)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_window_and_a_wrong_size_are_refused():
    model, data = single()
    with pytest.raises(BatchError, match="a Window is cut already"):
        check(model, make_loss(model), Window([data]))
    with pytest.raises(ValueError, match="micro_batch_size must be at least 1"):
        check(model, make_loss(model), data, micro_batch_size=0)


def test_a_nan_is_not_exact():
    model, (x, y) = single()
    x[3] = float("inf")
    assert not check(model, lambda b: model(b[0]).square().mean().clamp(max=1), (x, y)).exact


def test_one_row_is_exact():
    model, (x, y) = single()
    assert check(model, make_loss(model), (x[:1], y[:1])).exact


def test_sparse_and_unused_parameters_are_compared():
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(9, 6, sparse=True), nn.Linear(6, 3))
    model.unused = nn.Parameter(torch.ones(2))
    data = (torch.randint(9, (10, 5)), torch.randint(3, (10,)))
    loss_fn = lambda b: nn.functional.cross_entropy(model[1](model[0](b[0])), b[1])  # noqa: E731
    report = check(model, loss_fn, data)
    assert report.exact
    assert report.parameters["unused"] == 0


def test_rows_that_are_alike_in_the_beginning_do_not_deceive_it():
    """Sorted by length, the first rows all hold the same number of tokens."""
    model, (x, _) = single()
    mask = torch.zeros(10, 6)
    for row in range(10):
        mask[row, : 6 if row < 7 else 1] = 1

    def mean_over_mask(piece):
        x, mask = piece
        return (model(x).square().sum(-1, keepdim=True) * mask).sum() / mask.sum()

    assert not check(model, mean_over_mask, (x, mask)).exact


def test_a_metric_of_little_precision_does_not_excuse_a_wrong_loss():
    model, data = single()

    def loss_fn(piece):
        loss = WRONG["a weighted mean as a scalar"](model)(piece)
        return loss, {"logits": model(piece[0]).detach().bfloat16().mean()}

    report = check(model, loss_fn, data)
    assert not report.exact
    assert report.dtype == "float64"


def test_a_gradient_that_is_zero_everywhere_proves_nothing():
    model, data = single()
    with pytest.raises(BatchError, match="zero everywhere: there is nothing to compare"):
        check(model, lambda b: (model(b[0]) * 0).sum(), data)


def test_several_means_are_checked_with_the_counts_of_the_loss():
    model, data = single()

    def two_means(piece):
        losses = nn.functional.cross_entropy(model(piece[0]), piece[1], reduction="none")
        return {"all": Mean.of(losses), "some": Mean.of(losses, where=piece[1] > 0)}

    assert check(model, two_means, data).exact
    assert not check(model, lambda b: {name: t * t.count for name, t in two_means(b).items()}, data).exact


def test_gradients_of_frozen_parameters_are_kept():
    model, data = single()
    model[0].bias.requires_grad_(False)
    model[0].bias.grad = gradient = torch.ones_like(model[0].bias)
    check(model, make_loss(model), data)
    assert model[0].bias.grad is gradient


def test_every_cut_starts_from_the_same_buffers():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model()
            self.register_buffer("rows", torch.zeros(()))

        def forward(self, x):
            self.rows += len(x)
            return self.inner(x) * (1 + (self.rows > 7))

    model = Counting()
    assert check(model, make_loss(model), make_data()).exact
