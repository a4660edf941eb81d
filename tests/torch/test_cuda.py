"""The paths that only a GPU takes; skipped where there is none."""

import pytest
import torch
from models import make_data, make_loss, make_model, take_gradients
from to_plan import small_gpt
from torch import nn

from reference import assert_exact
from wholebatch import LossError, Mean
from wholebatch.pretrain.torch_memory import Peak
from wholebatch.torch import Accumulator, Window, backward, check, evaluate, plan, token_mean, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(seed=0):
    return make_model(seed).cuda()


def whole():
    model, data = make_model(), make_data()
    make_loss(model)(data).backward()
    return take_gradients(model)


FORMS = {
    "scalar": lambda loss, n: loss,
    "mean, counted on the host": lambda loss, n: Mean(loss * n, n),
    "mean, counted by a host tensor": lambda loss, n: Mean(loss * n, torch.tensor(n)),
    "mean, counted on the device": lambda loss, n: Mean(loss * n, torch.tensor(n, device="cuda")),
    "mixed": lambda loss, n: {"m": Mean(0.5 * loss * n, torch.tensor(n, device="cuda")), "s": 0.5 * loss},
    "metrics": lambda loss, n: (loss, {"n": n, "loss": loss}),
}


@pytest.mark.parametrize("where", ["cpu", "cuda", "pinned"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_pieces_go_to_the_device_and_the_gradient_is_exact(form, where):
    model, (x, y) = on_gpu(), make_data()
    data = {"cpu": (x, y), "cuda": (x.cuda(), y.cuda()), "pinned": (x.pin_memory(), y.pin_memory())}[where]
    loss_fn = make_loss(model)
    result = Accumulator(model, micro_batch_size=3).backward(lambda b: form(loss_fn(b), len(b[0])), data)
    assert result.loss.device.type == "cuda"
    model.cpu()
    assert_exact({name: p.grad.cpu().numpy() for name, p in model.named_parameters()}, whole())


@pytest.mark.parametrize("declared", ["host", "device"])
def test_counts_beforehand(declared):
    model, data = on_gpu(), make_data()
    loss_fn = make_loss(model)
    n = (lambda b: len(b[0])) if declared == "host" else (lambda b: torch.tensor(len(b[0]), device="cuda"))
    form = FORMS["mean, counted on the device"]
    Accumulator(model, micro_batch_size=3).backward(
        lambda b: {"a": 0.5 * form(loss_fn(b), len(b[0])), "b": 0.5 * form(loss_fn(b), len(b[0]))},
        data,
        counts=lambda b: {"a": n(b), "b": n(b)},
    )
    model.cpu()
    assert_exact({name: p.grad.cpu().numpy() for name, p in model.named_parameters()}, whole())


@pytest.mark.parametrize("form", FORMS, ids=FORMS)
@pytest.mark.parametrize("pieces", [1, 10])
def test_one_wait_per_batch(form, pieces):
    model, (x, y) = on_gpu(), make_data()
    data, loss_fn = (x.cuda(), y.cuda()), make_loss(model)
    count = torch.tensor(10 // pieces, device="cuda")
    forms = FORMS | {
        "mean, counted on the device": lambda loss, n: Mean(loss * n, count),
        "mixed": lambda loss, n: {"m": Mean(0.5 * loss * n, count), "s": 0.5 * loss},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    accumulator = Accumulator(model, num_micro_batches=pieces)
    step = lambda: accumulator.step(lambda b: forms[form](loss_fn(b), len(b[0])), data, optimizer, max_norm=1.0)  # noqa: E731
    step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as waits:
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1, [str(wait.message) for wait in waits]


def test_out_of_memory_leaves_no_trace():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).cuda()
    x = torch.randn(8, 4)
    model[0].weight.grad = before = torch.ones_like(model[0].weight)
    torch.cuda.manual_seed(0)
    state = torch.cuda.get_rng_state()
    calls = []

    def loss_fn(piece):
        calls.append(piece)
        loss = model(piece).square().mean()
        return loss if len(calls) < 3 else loss * torch.empty(2**45, device="cuda").sum()

    with pytest.raises(torch.OutOfMemoryError):
        backward(model, loss_fn, x, micro_batch_size=2)
    assert model[0].weight.grad is before
    assert torch.equal(before, torch.ones_like(before))
    assert model[0].bias.grad is None
    assert torch.equal(torch.cuda.get_rng_state(), state)
    calls.clear()
    backward(model, lambda piece: model(piece).square().mean(), x, micro_batch_size=2)


def test_peak_memory_grows_with_the_piece_and_not_with_the_batch():
    def peak(rows):
        torch.manual_seed(0)
        layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())]
        model = nn.Sequential(*layers).cuda()
        x = torch.randn(64 * 512, 256)[:rows]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = Accumulator(model, micro_batch_size=512)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            accumulator.step(lambda piece: model(piece).square().mean(), x, optimizer)
        return torch.cuda.max_memory_allocated()

    assert peak(64 * 512) == pytest.approx(peak(4 * 512), rel=0.05)


def test_a_scaler_skips_backs_off_and_recovers():
    model, (x, y) = on_gpu().float(), make_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
    accumulator = Accumulator(model, micro_batch_size=4)

    def loss_fn(piece):
        with torch.autocast("cuda", dtype=torch.float16):
            return make_loss(model)(piece)

    stepped = []
    for batch in range(6):
        bad = torch.where(torch.arange(10)[:, None] == 5, float("inf"), x.float()) if batch == 2 else x.float()
        stepped.append(accumulator.step(loss_fn, (bad, y), optimizer, scaler=scaler, max_norm=1.0).stepped)
    assert stepped == [True, True, False, True, True, True]
    assert accumulator.skipped == 1
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_are_summed_in_float32(dtype):
    weight = nn.Parameter(torch.zeros(3, dtype=dtype, device="cuda"))
    Accumulator([weight]).backward(lambda _: Mean(weight.sum(), 1) * 1000, Window(range(1000)))
    assert weight.grad.tolist() == [1000.0] * 3
    assert weight.grad.dtype == dtype


def test_ignored_labels_are_found_where_they_are():
    model, (x, y) = on_gpu(), make_data()
    y[3] = -100
    for labels in (y, y.cuda()):
        batch = {"x": x, "labels": labels}
        with pytest.raises(LossError, match="token_mean"):
            backward(model, lambda b: make_loss(model)((b["x"], b["labels"])), batch, micro_batch_size=4)


def test_checks_evaluates_and_trains():
    model, data = on_gpu().float(), make_data()
    x, y = data[0].float(), data[1]
    assert check(model, make_loss(model), (x, y)).exact
    loader = list(zip(x.split(4), y.split(4), strict=True))
    before = evaluate(model, make_loss(model), loader)
    assert before.rows == 10
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for precision in ("bf16", "fp16"):
        history = train(
            model, loader, optimizer, make_loss(model), epochs=10, accumulation_steps=3, precision=precision
        )
        assert history.steps >= 8
    assert evaluate(model, make_loss(model), loader).loss < before.loss


def test_batch_norm_statistics_follow_the_whole_batch():
    norm, twin = (nn.BatchNorm1d(4).double().cuda() for _ in range(2))
    x = make_data()[0].cuda()
    twin(x)
    with pytest.warns(UserWarning, match="each piece"):
        backward(norm, lambda b: norm(b).square().mean(), x, micro_batch_size=3, batch_norm="micro")
    assert torch.allclose(norm.running_mean, twin.running_mean, rtol=1e-12)
    assert torch.allclose(norm.running_var, twin.running_var, rtol=1e-12)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_the_planned_peak_is_the_allocators(size, foreach):
    model, _, ids = small_gpt()
    model, ids = model.cuda(), ids.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    planned = plan(model, lambda b: token_mean(model(b), b), ids, memory="64GiB", optimizer=optimizer)
    accumulator = Accumulator(model, micro_batch_size=size)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() - planned.parts["parameters"] - ids.nbytes
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        accumulator.step(lambda b: token_mean(model(b), b), ids, optimizer)
    assert planned.peak(size) == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.03)


def test_auto_starts_with_what_is_free_and_halves_where_that_is_not_enough():
    model, _, ids = small_gpt()
    model, sizes = model.cuda(), []

    def loss_fn(piece):
        sizes.append(len(piece))
        if type(piece) is torch.Tensor and len(piece) > 4:  # not while it is planned
            torch.empty(2**45, device="cuda")
        return token_mean(model(piece), piece)

    result = Accumulator(model, micro_batch_size="auto").backward(loss_fn, ids)
    assert sizes[-4:] == [4] * 4
    assert result.num_micro_batches == 4


class Words(nn.Module):
    def __init__(self, tied=False, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(101, 16, padding_idx=0)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.head = nn.Linear(16, 101, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.to(dtype)

    def forward(self, ids):
        return self.head(self.down(torch.tanh(self.up(self.words(ids)))))


def word_batch(lengths=(12, 3, 5, 1, 7, 12, 2, 4)):
    ids = torch.randint(1, 101, (len(lengths), 12), generator=torch.Generator().manual_seed(1))
    beyond = torch.arange(12) >= torch.tensor(lengths)[:, None]
    return {"ids": ids.masked_fill(beyond, 0), "labels": ids.masked_fill(beyond, -100)}


def word_loss(model, autocast=None):
    def loss_fn(b):
        with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
            return token_mean(model(b["ids"]), b["labels"])

    return loss_fn


def word_gradients(model, loss_fn, **options):
    model.zero_grad()
    backward(model, loss_fn, word_batch(), **options)
    return {name: p.grad.cpu().numpy() for name, p in model.named_parameters()}


def by_labels(b):
    return (b["labels"] != -100).sum(1)


@pytest.mark.parametrize("tied", [False, True])
def test_sums_in_place_are_exact(tied):
    model = Words(tied).cuda()
    whole = word_gradients(model, word_loss(model), in_place=False)
    assert_exact(word_gradients(model, word_loss(model), micro_batch_size=3, in_place=True), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_place_under_autocast_are_no_further_from_the_truth_than_autograds(dtype):
    model = Words(dtype=torch.float32).cuda()
    options = {"micro_batch_size": 1, "accum_dtype": torch.float32}
    truth = word_gradients(model, word_loss(model))
    plain = word_gradients(model, word_loss(model, dtype), in_place=False, **options)
    ours = word_gradients(model, word_loss(model, dtype), in_place=True, **options)
    scale = max(abs(gradient).max() for gradient in truth.values())
    for name, gradient in truth.items():
        allowed = abs(plain[name] - gradient).max() + torch.finfo(dtype).eps * scale
        assert abs(ours[name] - gradient).max() <= allowed


def test_16_bit_gradients_are_added_to_sums_of_32_bits_where_they_are_made():
    model = Words(dtype=torch.bfloat16).cuda()
    plain = float_gradients(model, in_place=False)
    assert_exact(float_gradients(model, in_place=True), plain, 8 * torch.finfo(torch.bfloat16).eps)
    assert model.up.weight.grad.dtype == torch.bfloat16


def float_gradients(model, **options):
    model.zero_grad()
    backward(model, word_loss(model), word_batch(), micro_batch_size=2, **options)
    return {name: p.grad.float().cpu().numpy() for name, p in model.named_parameters()}


def test_sums_in_place_are_the_same_each_time():
    model = Words(dtype=torch.float32).cuda()
    first, *others = [word_gradients(model, word_loss(model), micro_batch_size=2, in_place=True) for _ in range(5)]
    assert all((first[name] == again[name]).all() for again in others for name in first)


def test_sums_in_place_wait_for_nothing():
    model, data = Words(dtype=torch.float32).cuda(), {key: part.cuda() for key, part in word_batch().items()}
    accumulator = Accumulator(model, micro_batch_size=1, in_place=True)
    accumulator.backward(word_loss(model), data)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as waits:
            accumulator.backward(word_loss(model), data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1, [str(wait.message) for wait in waits]


@pytest.mark.parametrize("where", ["cpu", "cuda", "pinned"])
def test_regrouped_rows_give_the_gradient_of_the_padded_batch(where):
    model = Words().cuda()
    whole = word_gradients(model, word_loss(model))
    place = {"cpu": torch.Tensor.cpu, "cuda": torch.Tensor.cuda, "pinned": torch.Tensor.pin_memory}[where]
    model.zero_grad()
    data = {key: place(part) for key, part in word_batch().items()}
    result = backward(model, word_loss(model), data, lengths=by_labels, micro_batch_tokens=24)
    assert result.num_micro_batches > 1
    assert_exact({name: p.grad.cpu().numpy() for name, p in model.named_parameters()}, whole)


def test_regrouping_waits_once_for_lengths_on_the_device_and_not_for_each_piece():
    model, data = Words().cuda(), {key: part.cuda() for key, part in word_batch().items()}
    accumulator = Accumulator(model, lengths=by_labels, micro_batch_tokens=12)
    accumulator.backward(word_loss(model), data)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as waits:
            assert accumulator.backward(word_loss(model), data).num_micro_batches > 3
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 2, [str(wait.message) for wait in waits]


def test_the_peak_of_a_run_leaves_out_what_libraries_keep():
    matrix = torch.ones(1024, 1024, device="cuda")
    peak = Peak()
    torch._C._cuda_clearCublasWorkspaces()
    with peak.watching(lambda: matrix.nbytes):
        torch.mm(matrix, matrix)
    workspace = torch.cuda.memory_allocated() - matrix.nbytes
    assert peak.bytes == 2 * matrix.nbytes
    assert torch.cuda.max_memory_allocated() - peak.bytes == workspace > 0
