"""Whole runs: a loader of batches or of their pieces, and what the history says of them."""

import io
import sys

import pytest
import torch
from models import make_data, make_loss, make_model
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from reference import assert_exact
from wholebatch import BatchError, Mean, OptionError, Sum
from wholebatch.torch import evaluate, train

ROWS = 26


def make_loader(batch_size, rows=ROWS):
    return DataLoader(TensorDataset(*make_data(rows)), batch_size=batch_size)


def weights(model):
    return {name: p.detach().clone().numpy() for name, p in model.named_parameters()}


def raw_run(batch_size, epochs, make_optimizer, max_norm=None, schedule=None):
    """A plain loop over whole batches."""
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = schedule and schedule(optimizer)
    losses = []
    for _ in range(epochs):
        for batch in make_loader(batch_size):
            optimizer.zero_grad()
            loss = make_loss(model)(batch)
            loss.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            if scheduler:
                scheduler.step()
            losses.append(loss.item())
    return model, losses


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)


@pytest.mark.parametrize(
    ("batch_size", "options"),
    [(4, {"accumulation_steps": 3}), (12, {"micro_batch_size": 5}), (12, {"memory": "1MiB"}), (12, {})],
    ids=["micro-batches", "whole batches", "budget", "no cut"],
)
def test_a_run_equals_the_raw_loop_over_whole_batches(batch_size, options):
    """26 rows are two batches of 12 and one of 2, of which the micro-batches make a short window."""
    raw, losses = raw_run(12, 3, adamw, max_norm=0.1, schedule=halving)
    model = make_model()
    optimizer = adamw(model)
    history = train(
        model,
        make_loader(batch_size),
        optimizer,
        make_loss(model),
        epochs=3,
        max_norm=0.1,
        scheduler=halving(optimizer),
        **options,
    )
    with pytest.raises(AssertionError):
        assert_exact(weights(raw), weights(make_model()), tolerance=1e-3)
    assert_exact(weights(model), weights(raw), tolerance=1e-9)
    assert history.steps == len(history.step_losses) == 9
    assert history.step_losses == pytest.approx(losses, rel=1e-9)
    for epoch in range(3):
        a, b, c = losses[3 * epoch : 3 * epoch + 3]
        assert history.epoch_losses[epoch] == pytest.approx((12 * a + 12 * b + 2 * c) / 26, rel=1e-9)


def test_a_short_window_divided_by_the_full_count_fails_the_same_comparison():
    raw, _ = raw_run(12, 1, adamw)
    model = make_model()
    optimizer = adamw(model)
    pieces = list(make_loader(4))
    for i, piece in enumerate(pieces):
        (make_loss(model)(piece) / 3).backward()
        if i % 3 == 2 or i == len(pieces) - 1:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(weights(model), weights(raw), tolerance=1e-9)


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(*make_data(ROWS), strict=True)


def test_a_loader_of_unknown_length():
    model = make_model()
    history = train(model, DataLoader(Stream(), batch_size=4), adamw(model), make_loss(model), accumulation_steps=3)
    raw, _ = raw_run(12, 1, adamw)
    assert history.steps == 3
    assert_exact(weights(model), weights(raw), tolerance=1e-9)


def test_an_empty_loader_is_refused():
    model = make_model()
    with pytest.raises(BatchError, match=r"the loader yielded nothing$"):
        train(model, [], adamw(model), make_loss(model))


def test_an_iterator_can_be_read_once_only():
    model = make_model()
    with pytest.raises(BatchError, match="the loader yielded nothing in epoch 2: it must be possible to read it again"):
        train(model, iter(make_loader(12)), adamw(model), make_loss(model), epochs=2)


@pytest.mark.parametrize("whole", [False, True])
def test_a_loader_that_raises_in_the_middle_leaves_nothing_half_done(whole):
    model = make_model()

    def loader():
        for i, piece in enumerate(make_loader(4)):
            if i == 4:
                raise OSError("disk gone")
            yield piece

    options = {"micro_batch_size": 2} if whole else {"accumulation_steps": 3}
    with pytest.raises(OSError, match="disk gone"):
        train(model, loader(), adamw(model), make_loss(model), **options)
    assert all(p.grad is None for p in model.parameters())
    reference = make_model()
    whole_batches = list(make_loader(4))[:4] if whole else list(make_loader(12))[:1]
    train(reference, whole_batches, adamw(reference), make_loss(reference))
    assert_exact(weights(model), weights(reference), tolerance=1e-9)


def test_gradients_left_over_from_before_do_not_enter_the_first_step():
    model = make_model()
    make_loss(model)(make_data()).backward()
    train(model, make_loader(12), adamw(model), make_loss(model))
    raw, _ = raw_run(12, 1, adamw)
    assert_exact(weights(model), weights(raw), tolerance=1e-9)


def test_modules_stay_in_their_mode():
    model = nn.Sequential(make_model(), nn.BatchNorm1d(3).double().eval(), nn.Dropout(0.1))
    train(model, make_loader(12), adamw(model), make_loss(model), micro_batch_size=5)
    assert [module.training for module in model] == [True, False, True]


def test_batch_norm_trains_where_batches_are_not_cut():
    model = nn.Sequential(make_model(), nn.BatchNorm1d(3).double())
    assert train(model, make_loader(13), adamw(model), make_loss(model)).steps == 2


def padded_batches():
    """Two batches of token rows, padded on the right with 0."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([[5, 1, 3, 2, 4, 1], [2, 2, 5, 1, 1, 3]])
    tokens = torch.randint(1, 7, (2, 6, 5), generator=generator)
    return list(tokens * (torch.arange(5) < lengths[..., None]))


def make_token_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Tanh(), nn.Linear(4, 7)).double()


def two_terms(model, divided=lambda term: term):
    """Over the tokens, and over the rows that begin with an even one."""

    def loss_fn(tokens):
        logits, counts = model(tokens), counted(tokens)
        nll = nn.functional.cross_entropy(logits.mT, tokens, ignore_index=0, reduction="sum")
        even = (logits[:, 0].square().sum(1) * (tokens[:, 0] % 2 == 0)).sum()
        return {"nll": divided(Mean(nll, counts["nll"])), "even": divided(0.1 * Mean(even, counts["even"]))}

    return loss_fn


def counted(tokens):
    return {"nll": (tokens > 0).sum(), "even": (tokens[:, 0] % 2 == 0).sum()}


@pytest.mark.parametrize(
    "options",
    [
        {"lengths": lambda tokens: (tokens > 0).sum(1), "micro_batch_tokens": 6},
        {"lengths": lambda tokens: (tokens > 0).sum(1), "micro_batch_size": 2},
        {"num_micro_batches": 4, "in_place": True},
        {"accumulation_steps": 1},
    ],
    ids=["tokens", "lengths", "number", "no cut"],
)
def test_a_run_takes_counts_and_the_options_of_the_accumulator(options):
    raw, model = make_token_model(), make_token_model()
    optimizer = adamw(raw)
    for batch in padded_batches():
        optimizer.zero_grad()
        sum(two_terms(raw, lambda term: term.value)(batch).values()).backward()
        optimizer.step()
    history = train(model, padded_batches(), adamw(model), two_terms(model), counts=counted, **options)
    assert history.steps == 2
    assert_exact(weights(model), weights(raw), tolerance=1e-9)
    with pytest.raises(AssertionError):
        assert_exact(weights(make_token_model()), weights(raw), tolerance=1e-3)


def test_batch_norm_by_micro_batch_may_be_asked_for():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    with pytest.warns(UserWarning, match="normalised by the statistics of each piece"):
        train(model, make_loader(13), adamw(model), make_loss(model), micro_batch_size=4, batch_norm="micro")
    assert model[1].num_batches_tracked == 2


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_precisions(precision):
    torch.manual_seed(0)
    model = make_model().float()
    seen = []

    def loss_fn(piece):
        x, y = piece
        logits = model(x.float())
        seen.append(logits.dtype)
        return nn.functional.cross_entropy(logits, y)

    history = train(
        model, make_loader(4), torch.optim.SGD(model.parameters(), lr=0.5), loss_fn,
        epochs=8, accumulation_steps=2, precision=precision,
    )  # fmt: skip
    assert set(seen) == {{"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
    assert history.epoch_losses[-1] < history.epoch_losses[0]
    assert 30 <= history.steps <= 32, "a scaler may skip its first steps"


def test_a_scaler_of_your_own_and_a_step_that_it_skips():
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = make_data(ROWS)
    x[5] = float("inf")
    loader = DataLoader(TensorDataset(x, y), batch_size=12)
    history = train(model, loader, adamw(model), make_loss(model), scaler=scaler)
    assert history.steps == len(history.step_losses) == 2
    assert scaler.get_scale() == 2.0**9
    assert torch.isfinite(torch.tensor(history.epoch_losses)).all()


def test_epoch_losses_are_weighted_by_what_was_counted():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, y = make_data(ROWS)
    per_row = nn.functional.cross_entropy(model(x), y, reduction="none").detach()
    kept = y > 0

    def masked(piece):
        x, y = piece
        return Mean.of(nn.functional.cross_entropy(model(x), y, reduction="none"), where=y > 0)

    history = train(model, make_loader(12), optimizer, masked)
    assert history.epoch_losses[0] == pytest.approx(per_row[kept].mean().item(), rel=1e-9)

    def two_terms(piece):
        loss = make_loss(model)(piece)
        return {"a": 0.5 * loss, "b": 0.5 * loss}

    history = train(model, make_loader(12), optimizer, two_terms)
    assert history.epoch_losses[0] == pytest.approx(per_row.mean().item(), rel=1e-9)
    history = train(model, make_loader(13), optimizer, lambda b: Sum(make_loss(model)(b) * len(b[0])))
    assert history.epoch_losses[0] == pytest.approx(per_row.sum().item() / 2, rel=1e-9)


@pytest.mark.filterwarnings("ignore")
def test_an_epoch_without_a_step_has_no_loss():
    model = make_model()
    history = train(model, make_loader(12), adamw(model), lambda b: Mean(make_loss(model)(b), 0))
    assert history.steps == 0
    assert history.epoch_losses[0] != history.epoch_losses[0]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, stream, **options):
    monkeypatch.setattr(sys, "stderr", stream)
    model = make_model()
    train(model, make_loader(4), adamw(model), make_loss(model), accumulation_steps=3, **options)
    return stream.getvalue()


def test_a_terminal_sees_a_bar_with_loss_and_rate(monkeypatch):
    text = shown(monkeypatch, Terminal())
    assert "epoch 1/1" in text
    assert "3/3" in text
    assert "loss " in text
    assert "step/s" in text or "s/step" in text


def test_nothing_is_shown_elsewhere_or_when_switched_off(monkeypatch):
    assert shown(monkeypatch, io.StringIO()) == ""
    assert shown(monkeypatch, Terminal(), progress=False) == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"accumulation_steps": 0}, "accumulation_steps must be at least 1, got 0"),
        ({"accumulation_steps": 2, "micro_batch_size": 2}, "both accumulation_steps=2 and micro_batch_size=2"),
        ({"accumulation_steps": 2, "num_micro_batches": 3}, "both accumulation_steps=2 and num_micro_batches=3"),
        ({"accumulation_steps": 2, "memory": "1GiB"}, "both accumulation_steps=2 and memory='1GiB'"),
        ({"accumulation_steps": 2, "lengths": len}, "both accumulation_steps=2 and lengths=<built-in function len>"),
        ({"precision": "int8"}, 'precision must be "fp32", "bf16" or "fp16", got \'int8\''),
        ({"max_norm": -1}, "max_norm must be a positive number"),
    ],
)
def test_misuse_is_refused_before_any_work(options, text):
    model = make_model()
    with pytest.raises(OptionError, match=text):
        train(model, make_loader(4), adamw(model), lambda b: pytest.fail("called"), **options)


# evaluate


@pytest.mark.parametrize("batch_size", [1, 7, 26])
def test_evaluation_is_exact_over_ragged_batches(batch_size):
    model = nn.Sequential(make_model(), nn.Dropout(0.5), nn.BatchNorm1d(3).double())
    x, y = make_data(ROWS)
    model[2].eval()

    def loss_fn(piece):
        logits = model(piece[0])
        right = (logits.argmax(-1) == piece[1]).double()
        losses = nn.functional.cross_entropy(logits, piece[1], reduction="none")
        return (
            {"all": losses.mean(), "some": Mean.of(losses, where=piece[1] > 0)},
            {"accuracy": right.mean(), "hits": Sum(right.sum())},
        )

    before = {name: b.clone() for name, b in model.named_buffers()}
    result = evaluate(model, loss_fn, make_loader(batch_size))
    assert [module.training for module in model] == [True, True, False]
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    model.eval()
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    right = model(x).argmax(-1) == y
    assert result.terms["all"].item() == pytest.approx(losses.mean().item(), rel=1e-12)
    assert result.terms["some"].item() == pytest.approx(losses[y > 0].mean().item(), rel=1e-12)
    assert result.metrics["accuracy"].item() == pytest.approx(right.double().mean().item(), rel=1e-12)
    assert result.metrics["hits"] == right.sum()
    assert result.count == {"all": 26, "some": int((y > 0).sum())}
    assert (result.rows, result.num_micro_batches, result.stepped) == (26, -(-26 // batch_size), False)
    assert not result.loss.requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_the_mean_of_batch_means_would_not_be():
    model = make_model()
    naive = torch.stack([make_loss(model)(batch) for batch in make_loader(7)]).mean().item()
    exact = evaluate(model, make_loss(model), make_loader(7)).loss.item()
    assert exact == pytest.approx(make_loss(model)(make_data(ROWS)).item(), rel=1e-12)
    assert abs(naive - exact) > 1e-4


def test_modes_come_back_after_a_failure():
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5).eval())
    with pytest.raises(RuntimeError, match="boom"):
        evaluate(model, lambda b: (_ for _ in ()).throw(RuntimeError("boom")), [torch.ones(2)])
    assert [module.training for module in model] == [True, False]


def test_evaluation_refuses_what_training_refuses():
    model = make_model()
    with pytest.raises(BatchError, match="the loader yielded nothing"):
        evaluate(model, make_loss(model), [])
    labels = {"labels": torch.tensor([1, -100])}
    clean = {"labels": torch.tensor([1, 1])}
    for loader in ([labels, clean], [clean, labels, clean]):
        with pytest.raises(ValueError, match="token_mean"):
            evaluate(model, lambda b: torch.zeros(()), loader)
    assert evaluate(model, lambda b: Mean(torch.zeros(()), 1), [labels]).loss == 0


def test_parameters_may_come_from_a_generator():
    model = make_model()
    assert train(model.parameters(), make_loader(12), adamw(model), make_loss(model)).steps == 3


def test_a_model_without_parameters_is_refused():
    with pytest.raises(BatchError, match="the model has no parameters"):
        train(nn.Dropout(), make_loader(12), adamw(make_model()), make_loss(make_model()))
