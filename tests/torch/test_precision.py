"""16-bit gradients are summed in float32 and rounded once; sums of tokens stay in the range of float16."""

import pytest
import torch
from models import make_data, make_loss, make_model, take_gradients, whole_gradients
from torch import nn

from reference import assert_exact
from wholebatch import Mean, Sum
from wholebatch.torch import Accumulator, Window, backward


def ones_added(count, dtype, **options):
    """The gradient of adding 1.0 `count` times."""
    weight = nn.Parameter(torch.zeros(3, dtype=dtype))
    pieces = Window([None] * count)
    Accumulator([weight], **options).backward(lambda _: Sum(weight.sum()), pieces)
    return weight.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adding_one_a_thousand_times_gives_a_thousand(dtype):
    gradient = ones_added(1000, dtype)
    assert gradient.dtype == dtype
    assert gradient.tolist() == [1000.0] * 3


def test_a_plain_bf16_sum_stops_growing():
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    for _ in range(1000):
        weight.sum().backward()
    assert weight.grad.tolist() == [256.0] * 3
    assert ones_added(1000, torch.bfloat16, accum_dtype=torch.bfloat16).tolist() == [256.0] * 3


def test_an_explicit_dtype_is_summed_in_and_rounded_once():
    assert ones_added(1000, torch.bfloat16, accum_dtype=torch.float64).dtype == torch.bfloat16
    weight = nn.Parameter(torch.zeros(1))
    pieces = Window([1e8, 1.0, -1e8])
    for dtype, expected in ((torch.float64, 1.0), ("auto", 0.0)):
        Accumulator([weight], accum_dtype=dtype).backward(lambda x: Sum(x * weight.sum()), pieces)
        assert weight.grad.item() == expected
        assert weight.grad.dtype == weight.grad_dtype == torch.float32
        weight.grad = None


@pytest.mark.parametrize("wrong", [torch.int32, "float32", None, 32])
def test_what_is_no_floating_point_dtype_is_refused(wrong):
    with pytest.raises(TypeError, match='accum_dtype must be "auto" or a floating point torch.dtype'):
        Accumulator(make_model(), accum_dtype=wrong)


def test_the_gradient_takes_the_dtype_that_the_optimizer_takes():
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    Accumulator([weight]).backward(lambda _: Sum(weight.sum()), Window([None] * 300))
    assert weight.grad.dtype == torch.float32
    assert weight.grad_dtype == torch.float32
    assert weight.grad.tolist() == [300.0] * 3


def test_one_piece_is_plain_autograd():
    model = make_model().bfloat16()
    x, y = make_data()
    data = (x.bfloat16(), y)
    make_loss(model)(data).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    backward(model, make_loss(model), data)
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("had_gradients", [False, True])
@pytest.mark.parametrize("max_norm", [None, 1e-2])
def test_rounding_comes_last(had_gradients, max_norm):
    """Each piece's gradient is a number of 16 bits; their sum in float32, clipped, is rounded to the nearest."""
    weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    pieces = [torch.full((4,), value, dtype=torch.bfloat16) for value in (1.0, 2**-9, 2**-9, 3 * 2**-9)]
    exact = torch.full((4,), 1.0 + 5 * 2**-9)
    if had_gradients:
        weight.grad = torch.full_like(weight, 2**-9)
        exact += 2**-9
    accumulator = Accumulator([weight])
    for piece in pieces:
        accumulator.add(Sum((weight * piece).sum()))
    result = accumulator.finish(max_norm=max_norm)
    if max_norm is not None:
        assert result.grad_norm.item() == pytest.approx(2 * exact[0].item(), rel=1e-6)
        exact *= max_norm / (2 * exact[0] + 1e-6)
    assert torch.equal(weight.grad, exact.bfloat16())


def test_half_precision_is_close_to_the_whole():
    model, (x, y) = make_model(), make_data()
    whole = whole_gradients(model, lambda: make_loss(model)((x, y)))
    model.bfloat16()
    result = backward(model, make_loss(model), (x.bfloat16(), y), micro_batch_size=1)
    split = {name: gradient.astype("float64") for name, gradient in take_gradients_in_float(model).items()}
    assert_exact(split, whole, tolerance=0.03)
    assert result.loss.dtype == torch.float32


def take_gradients_in_float(model):
    model.float()
    return take_gradients(model)


def test_a_failure_restores_the_grad_dtype():
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    before = torch.ones_like(weight)
    weight.grad = before

    def loss_fn(piece):
        if piece:
            raise RuntimeError("boom")
        return Sum(weight.sum())

    with pytest.raises(RuntimeError, match="boom"):
        Accumulator([weight]).backward(loss_fn, Window([0, 1]))
    assert weight.grad is before
    assert weight.grad_dtype == torch.bfloat16
    assert before.tolist() == [1.0] * 3


def test_optimizers_see_gradients_of_their_parameters_dtype():
    model = make_model().bfloat16()
    x, y = make_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.extend(p.grad.dtype for p in model.parameters()))
    assert Accumulator(model, micro_batch_size=3).step(make_loss(model), (x.bfloat16(), y), optimizer).stepped
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("as_count", [int, torch.tensor], ids=["int", "tensor"])
@pytest.mark.parametrize("known", [False, True])
def test_sums_over_many_tokens_stay_in_the_range_of_float16(as_count, known):
    """A sum of 2**20 gradients of 1.0 overflows float16; their mean is 1.0."""
    tokens = 2**18
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))

    def loss_fn(_):
        return Mean((weight * tokens).float().sum(), as_count(tokens))

    counts = (lambda _: as_count(tokens)) if known else None
    Accumulator([weight]).backward(loss_fn, Window(range(4)), counts=counts)
    assert weight.grad.tolist() == [1.0]


@pytest.mark.parametrize("as_count", [int, torch.tensor], ids=["int", "tensor"])
def test_a_first_piece_that_counts_nothing_does_not_break_the_scale(as_count):
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    pieces = Window([0, 2**22, 2**22, 2**22])
    Accumulator([weight]).backward(lambda n: Mean((weight.float() * n).sum(), as_count(n)), pieces)
    assert weight.grad.tolist() == [1.0]


def test_a_batch_leaves_parameters_free_to_change_their_dtype():
    model, data = make_model().float(), (make_data()[0].float(), make_data()[1])
    backward(model, make_loss(model), data, micro_batch_size=3)
    model.zero_grad()
    model.double()
    backward(model, make_loss(model), make_data(), micro_batch_size=3)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}


def test_check_sees_the_same_after_a_batch_in_16_bits():
    from wholebatch.torch import check

    model, (x, y) = make_model().bfloat16(), make_data()
    data = (x.bfloat16(), y)
    weighted = lambda b: nn.functional.cross_entropy(  # noqa: E731
        model(b[0]), b[1], weight=torch.tensor([1.0, 1.01, 1.0], dtype=b[0].dtype)
    )
    before = check(model, weighted, data)
    backward(model, make_loss(model), data, micro_batch_size=3)
    model.zero_grad()
    after = check(model, weighted, data)
    assert not before.exact
    assert (after.exact, after.error, after.dtype) == (before.exact, before.error, before.dtype)


def test_the_norm_of_one_piece_does_not_overflow_in_float16():
    weight = nn.Parameter(torch.zeros(8, dtype=torch.float16))
    accumulator = Accumulator([weight], num_micro_batches=1)
    accumulator.step(
        lambda _: (weight.float() * 40000).sum(), torch.ones(2), torch.optim.SGD([weight], 1e-3), max_norm=1.0
    )
    assert weight.tolist() == pytest.approx([-1e-3 / 8**0.5] * 8, rel=1e-2)
