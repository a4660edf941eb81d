"""`GradScaler` for real, on the CPU: an overflow skips exactly one step, backs off, and recovers."""

import pytest
import torch
from models import make_data, make_loss, make_model, take_gradients, whole_gradients
from torch import nn

from reference import assert_exact
from wholebatch import Mean
from wholebatch.torch import Accumulator, Window


def make_scaler(**options):
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**10, "growth_interval": 3} | options)


def weights(model):
    return {name: p.detach().clone().numpy() for name, p in model.named_parameters()}


FORMS = {
    "scalar": lambda loss, n: loss,
    "mean": lambda loss, n: Mean(loss * n, n),
    "mean, counted on the device": lambda loss, n: Mean(loss * n, torch.tensor(n)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_backward_leaves_the_gradient_scaled(form):
    model, data = make_model(), make_data()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: 2.0**10 * loss_fn(data))
    result = Accumulator(model, micro_batch_size=3).backward(
        lambda b: form(loss_fn(b), len(b[0])), data, scaler=make_scaler()
    )
    assert_exact(take_gradients(model), whole)
    assert result.loss.item() == pytest.approx(loss_fn(data).item(), rel=1e-12), "the loss is not"


@pytest.mark.parametrize("way", ["step", "add and finish"])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_a_run_with_an_overflow_equals_the_raw_loop(way, max_norm):
    raw, ours = make_model(), make_model()
    raw_optimizer, our_optimizer = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (raw, ours))
    raw_scaler, our_scaler = make_scaler(), make_scaler()
    scheduler = torch.optim.lr_scheduler.StepLR(our_optimizer, 100)
    accumulator = Accumulator(ours, micro_batch_size=4)
    start, stepped, scales = weights(raw), [], []
    for batch in range(10):
        x, y = make_data(10, batch)
        x[5] *= float("inf") if batch == 4 else 1.0

        raw_optimizer.zero_grad()
        raw_scaler.scale(make_loss(raw)((x, y))).backward()
        raw_scaler.unscale_(raw_optimizer)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(raw.parameters(), max_norm)
        raw_scaler.step(raw_optimizer)
        raw_scaler.update()

        if way == "step":
            result = accumulator.step(
                make_loss(ours), (x, y), our_optimizer, max_norm=max_norm, scaler=our_scaler, scheduler=scheduler
            )
        else:
            for x_piece, y_piece in zip(x.split(4), y.split(4), strict=True):
                accumulator.add(make_loss(ours)((x_piece, y_piece)), rows=len(x_piece))
            result = accumulator.finish(our_optimizer, max_norm=max_norm, scaler=our_scaler, scheduler=scheduler)
        stepped.append(result.stepped)
        scales.append(our_scaler.get_scale())
        assert our_scaler.get_scale() == raw_scaler.get_scale()
        assert all(p.grad is None for p in ours.parameters())
    assert stepped == [batch != 4 for batch in range(10)]
    assert scales[3] / scales[4] == 2, "it backed off"
    assert scales[-1] > scales[4], "it recovered"
    assert (accumulator.skipped, scheduler.last_epoch) == (1, 9)
    assert our_optimizer.state[ours[0].weight]["step"] == 9
    with pytest.raises(AssertionError):
        assert_exact(weights(ours), start, tolerance=1e-3)
    assert_exact(weights(ours), weights(raw), tolerance=1e-9)


def test_a_fused_optimizer_that_skips_by_itself_is_seen_to():
    model, (x, y) = make_model(), make_data()
    x[0] = float("inf")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    before = weights(model)
    accumulator = Accumulator(model, micro_batch_size=4)
    assert not accumulator.step(make_loss(model), (x, y), optimizer, scaler=make_scaler()).stepped
    assert accumulator.skipped == 1
    assert_exact(weights(model), before)
    assert accumulator.step(make_loss(model), make_data(), optimizer, scaler=make_scaler()).stepped


def test_autocast_in_float16_trains():
    model, (x, y) = make_model().float(), make_data()
    data = (x.float(), y)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.5), make_scaler()
    accumulator = Accumulator(model, micro_batch_size=4)

    def loss_fn(piece):
        with torch.autocast("cpu", dtype=torch.float16):
            return make_loss(model)(piece)

    losses = [accumulator.step(loss_fn, data, optimizer, scaler=scaler).loss.item() for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_agrees_with_the_unsplit_batch_under_autocast(dtype):
    model, (x, y) = make_model().float(), make_data()
    data = (x.float(), y)

    def loss_fn(piece):
        with torch.autocast("cpu", dtype=dtype):
            return make_loss(model)(piece)

    whole = whole_gradients(model, lambda: loss_fn(data))
    Accumulator(model, micro_batch_size=3).backward(loss_fn, data)
    assert_exact(take_gradients(model), whole, tolerance=16 * torch.finfo(dtype).eps)


def test_small_gradients_survive_float16_only_with_the_scale():
    def gradient(scaler):
        weight = nn.Parameter(torch.ones(1))
        x = torch.tensor([2.0**-13])

        def loss_fn(_):  # the gradient with respect to the float16 product is 2**-26, which float16 rounds to 0
            return (weight.half() * x.half()).float().sum() * 2.0**-26

        accumulator = Accumulator([weight], num_micro_batches=2)
        accumulator.backward(loss_fn, torch.ones(4), scaler=scaler)
        return weight.grad.item()

    assert gradient(None) == 0
    assert gradient(make_scaler(init_scale=2.0**16)) == 2.0**-39 * 2.0**16


def test_a_batch_that_counts_nothing_does_not_touch_the_scaler():
    model, data = make_model(), make_data()
    scaler = make_scaler(growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    accumulator = Accumulator(model, micro_batch_size=4)
    result = accumulator.step(lambda b: Mean(make_loss(model)(b), torch.tensor(0)), data, optimizer, scaler=scaler)
    assert (result.stepped, accumulator.skipped, scaler.get_scale()) == (False, 1, 2.0**10)
    assert accumulator.step(make_loss(model), data, optimizer, scaler=scaler).stepped


def test_several_optimizers_share_a_scaler():
    model, twin, data = make_model(), make_model(), make_data()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    accumulator = Accumulator(model, micro_batch_size=4)
    assert accumulator.step(make_loss(model), data, optimizers, scaler=make_scaler(), max_norm=0.1).stepped
    make_loss(twin)(data).backward()
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert_exact(weights(model), weights(twin), tolerance=1e-9)


def test_a_disabled_scaler_changes_nothing():
    model, data = make_model(), make_data()
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    scaler = make_scaler(enabled=False)
    accumulator = Accumulator(model, micro_batch_size=4)
    accumulator.backward(make_loss(model), data, scaler=scaler)
    assert_exact(take_gradients(model), whole)
    assert accumulator.step(make_loss(model), data, torch.optim.SGD(model.parameters(), 0.1), scaler=scaler).stepped


def test_a_failing_unscale_leaves_no_trace():
    model = make_model().half()
    x, y = make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].weight.grad = before = torch.ones_like(model[0].weight)
    scaler = make_scaler()
    scaler.unscale_ = lambda optimizer: (_ for _ in ()).throw(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        Accumulator(model, micro_batch_size=4).step(make_loss(model), (x.half(), y), optimizer, scaler=scaler)
    assert model[0].weight.grad is before
    assert model[0].weight.grad_dtype == torch.float16
    assert model[0].bias.grad is None


def test_the_scaler_decides_and_not_the_policy():
    model, (x, y) = make_model(), make_data()
    x[0] = float("nan")
    scaler = make_scaler()
    result = Accumulator(model, on_nonfinite="raise", micro_batch_size=4).step(
        make_loss(model), (x, y), torch.optim.SGD(model.parameters(), 0.1), scaler=scaler
    )
    assert not result.stepped
    assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scaler": 3}, "scaler must be a GradScaler, got int"),
        ({"scaler": make_scaler(), "max_norm": 1.0}, "max_norm with a scaler needs the optimizer"),
    ],
)
def test_misuse_is_refused(options, text):
    accumulator = Accumulator(make_model())
    with pytest.raises(ValueError, match=text):
        accumulator.finish(**options)


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_an_overflow_in_one_optimizers_gradients_holds_back_all(max_norm):
    models = [make_model(0), make_model(1)]
    x, y = make_data()
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    before = [weights(model) for model in models]
    scaler = make_scaler()
    accumulator = Accumulator(models, micro_batch_size=4)

    def loss_fn(piece):
        return {"a": make_loss(models[0])(piece), "b": make_loss(models[1])(piece) * float("inf")}

    result = accumulator.step(loss_fn, (x, y), optimizers, scaler=scaler, max_norm=max_norm)
    assert (result.stepped, accumulator.skipped, scaler.get_scale()) == (False, 1, 2.0**9)
    for model, start, optimizer in zip(models, before, optimizers, strict=True):
        assert_exact(weights(model), start)
        assert not optimizer.state


@pytest.mark.parametrize("way", ["step", "finish"])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_gradients_that_were_there_are_added_once(way, max_norm):
    raw, ours, data = make_model(), make_model(), make_data()
    raw_optimizer, our_optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (raw, ours))
    scaler, raw_scaler = make_scaler(), make_scaler()
    for _ in range(2):
        raw_scaler.scale(make_loss(raw)(data)).backward()
    raw_scaler.unscale_(raw_optimizer)
    if max_norm is not None:
        nn.utils.clip_grad_norm_(raw.parameters(), max_norm)
    raw_optimizer.step()

    scaler.scale(make_loss(ours)(data)).backward()
    accumulator = Accumulator(ours, micro_batch_size=4)
    if way == "step":
        accumulator.step(make_loss(ours), data, our_optimizer, scaler=scaler, max_norm=max_norm)
    else:
        accumulator.add(make_loss(ours)(data), rows=10)
        accumulator.finish(our_optimizer, scaler=scaler, max_norm=max_norm)
    assert_exact(weights(ours), weights(raw), tolerance=1e-9)


def test_token_sums_under_a_scaler_have_the_size_of_means():
    """2**18 tokens and a scale of 2**10 would overflow float16; so would tokens alone."""
    tokens = 2**18
    weight = nn.Parameter(torch.zeros(1))

    def loss_fn(_):
        return Mean(weight.half().float().sum() * tokens, torch.tensor(tokens))

    accumulator = Accumulator([weight])
    accumulator.backward(loss_fn, Window(range(4)), scaler=make_scaler())
    assert weight.grad.item() == 2.0**10


def test_two_accumulators_may_share_a_scaler():
    models, data = [make_model(0), make_model(1)], make_data()
    twins = [make_model(0), make_model(1)]
    scaler = make_scaler(growth_interval=1)
    accumulators = [Accumulator(model) for model in models]
    for _ in range(3):
        for accumulator, model in zip(accumulators, models, strict=True):
            accumulator.add(make_loss(model)(data), rows=10)
        for accumulator, model in zip(accumulators, models, strict=True):
            assert accumulator.finish(torch.optim.SGD(model.parameters(), 0.1), scaler=scaler).stepped
        for twin in twins:
            make_loss(twin)(data).backward()
            optimizer = torch.optim.SGD(twin.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    for model, twin in zip(models, twins, strict=True):
        assert_exact(weights(model), weights(twin), tolerance=1e-9)


def test_a_disabled_scaler_leaves_the_decision_to_the_policy():
    model, (x, y) = make_model(), make_data()
    x[0] = float("nan")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ArithmeticError):
        Accumulator(model, micro_batch_size=4).step(
            make_loss(model), (x, y), optimizer, scaler=make_scaler(enabled=False)
        )


@pytest.mark.parametrize("place", ["unscale_", "commit"])
def test_a_scaler_can_be_used_again_after_a_failure(place, monkeypatch):
    model, data = make_model(), make_data()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    scaler = make_scaler()
    accumulator = Accumulator(model, micro_batch_size=4)
    with monkeypatch.context() as patched:
        if place == "commit":
            patched.setattr("wholebatch.torch._batch.GradientSums.commit", lambda self: 1 / 0)
        else:
            unscale = scaler.unscale_
            patched.setattr(scaler, "unscale_", lambda o: 1 / 0 if o is optimizers[1] else unscale(o))
        with pytest.raises(ZeroDivisionError):
            accumulator.step(make_loss(model), data, optimizers, scaler=scaler)
    assert all(p.grad is None for p in model.parameters())
    assert scaler.get_scale() == 2.0**10
    assert accumulator.step(make_loss(model), data, optimizers, scaler=scaler).stepped


def test_an_optimizer_without_gradients_is_left_out():
    model, other, data = make_model(), make_model(1), make_data()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, other)]
    accumulator = Accumulator([model, other], micro_batch_size=4)
    scaler = make_scaler()
    for _ in range(2):
        assert accumulator.step(make_loss(model), data, optimizers, scaler=scaler).stepped


@pytest.mark.parametrize("size", [4, 10])
def test_parameters_in_float16_train_with_a_scaler_in_any_number_of_pieces(size):
    model, (x, y) = make_model().half(), make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = weights(model)
    result = Accumulator(model, micro_batch_size=size).step(
        make_loss(model), (x.half(), y), optimizer, scaler=make_scaler(), max_norm=1.0
    )
    assert result.stepped
    assert result.grad_norm.isfinite()
    with pytest.raises(AssertionError):
        assert_exact(weights(model), start, tolerance=1e-3)
