"""Models of every kind: what they do with their parameters does not change the gradient of the whole."""

import pytest
import torch
from models import make_data, make_loss, make_model, take_gradients, whole_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from reference import assert_exact
from wholebatch import LossError, Mean, Sum
from wholebatch._report import tolerance
from wholebatch.torch import Accumulator, backward


class Tied(nn.Module):
    """One weight used twice, one frozen, one unused."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 6, dtype=torch.float64)
        self.head = nn.Linear(6, 9, dtype=torch.float64)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(6, 6, dtype=torch.float64).requires_grad_(False)
        self.unused = nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, ids):
        return self.head(self.frozen(self.embedding(ids)).tanh().mean(1))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))

    def forward(self, x):
        return (x.to(torch.complex128) @ self.weight).abs()


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.inner = make_model()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        hidden = self.inner[0](x)
        hidden = checkpoint(lambda h: self.inner[1](h) * 2, hidden, use_reentrant=self.use_reentrant)
        return checkpoint(self.inner[2], hidden, use_reentrant=self.use_reentrant)


class Sometimes(nn.Module):
    """A branch that only some pieces take."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = make_model(0), make_model(1)

    def forward(self, x):
        taken = x[:, 0] > 0
        logits = self.always(x)
        if taken.any():
            logits = logits.index_add(0, taken.nonzero()[:, 0], self.sometimes(x[taken]))
        return logits


def ids():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(9, (10, 5), generator=generator), torch.randint(9, (10,), generator=generator)


MODELS = {
    "tied, frozen and unused": (Tied, ids),
    "complex": (Complex, make_data),
    "reentrant checkpoint": (lambda: Checkpointed(True), make_data),
    "checkpoint": (lambda: Checkpointed(False), make_data),
    "a branch some pieces take": (Sometimes, make_data),
}


@pytest.mark.parametrize(("make", "data"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("form", ["scalar", "mean", "mixed"])
@pytest.mark.parametrize("size", [1, 4])
def test_the_split_gradient_is_the_whole_one(make, data, form, size):
    model, batch = make(), data()
    loss_fn = make_loss(model)
    forms = {
        "scalar": loss_fn,
        "mean": lambda b: Mean(loss_fn(b) * len(b[0]), len(b[0])),
        "mixed": lambda b: {"m": Mean(0.5 * loss_fn(b) * len(b[0]), len(b[0])), "s": 0.5 * loss_fn(b)},
    }
    whole = whole_gradients(model, lambda: loss_fn(batch))
    backward(model, forms[form], batch, micro_batch_size=size)
    split = take_gradients(model)
    assert_exact(split, whole)
    assert not any(name.startswith(("frozen", "unused")) for name in split)


def test_single_precision_agrees_to_its_rounding():
    model, (x, y) = make_model().float(), make_data()
    data = (x.float(), y)
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    backward(model, make_loss(model), data, micro_batch_size=1)
    assert_exact(take_gradients(model), whole, tolerance=tolerance(torch.finfo(torch.float32).eps, pieces=10))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model(backend):
    torch._dynamo.reset()
    model, data = make_model(), make_data()
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    compiled = torch.compile(model, backend=backend)
    Accumulator(compiled, micro_batch_size=4).backward(make_loss(compiled), data)
    assert_exact(take_gradients(model), whole)


def test_a_compiled_model_that_bears_one_backward_is_told_about_counts():
    torch._dynamo.reset()
    model, (x, y) = make_model(), make_data()
    whole = whole_gradients(model, lambda: model(x).square().sum() / 20 + model(x).mean())
    compiled = torch.compile(model, backend="aot_eager")

    def loss_fn(piece):
        outputs = compiled(piece[0])
        return {"a": Mean(outputs.square().sum(), 2 * len(outputs)), "b": outputs.mean()}

    accumulator = Accumulator(compiled, micro_batch_size=4)
    with pytest.raises(LossError, match="a compiled model gives its buffers away in the first: .* with counts="):
        accumulator.backward(loss_fn, (x, y))
    assert all(parameter.grad is None for parameter in model.parameters())
    accumulator.backward(loss_fn, (x, y), counts=lambda piece: {"a": 2 * len(piece[0])})
    assert_exact(take_gradients(model), whole)


def test_balanced_pieces_compile_for_one_size_and_one_more():
    torch._dynamo.reset()
    compiled_for = []

    def backend(graph, inputs):
        compiled_for.append(graph)
        return graph.forward

    model = make_model()
    compiled = torch.compile(model, backend=backend, dynamic=False)
    accumulator = Accumulator(compiled, micro_batch_size=4)
    for seed in range(3):
        accumulator.backward(make_loss(compiled), make_data(10, seed))
    assert len(compiled_for) == 2


def test_hooks_see_every_piece():
    model, data = make_model(), make_data()
    model[0].weight.register_hook(lambda gradient: 3 * gradient)
    seen = {"forward": 0, "backward": 0, "accumulated": 0}
    whole = whole_gradients(model, lambda: make_loss(model)(data))

    def count(what):
        def hook(*_):
            seen[what] += 1

        return hook

    model[2].register_forward_hook(count("forward"))
    model[2].register_full_backward_hook(count("backward"))
    model[2].weight.register_post_accumulate_grad_hook(count("accumulated"))
    backward(model, make_loss(model), data, micro_batch_size=4)
    assert_exact(take_gradients(model), whole)
    assert seen == {"forward": 3, "backward": 3, "accumulated": 3}


@pytest.mark.parametrize("had_gradients", ["none", "sparse", "dense"])
@pytest.mark.parametrize("max_norm", [None, 1e-3])
def test_sparse_gradients(had_gradients, max_norm):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.EmbeddingBag(9, 6, sparse=True), nn.Linear(6, 9)).double()

    model, batch = make(), ids()
    loss_fn = make_loss(model)
    factor = 1 if had_gradients == "none" else 2
    whole = whole_gradients(model, lambda: factor * loss_fn(batch))
    if had_gradients != "none":
        loss_fn(batch).backward()
    if had_gradients == "dense":
        model[0].weight.grad = model[0].weight.grad.to_dense()
    accumulator = Accumulator(model, micro_batch_size=3)
    for x, y in zip(batch[0].split(4), batch[1].split(4), strict=True):
        accumulator.add(loss_fn((x, y)), rows=len(x))
    result = accumulator.finish(max_norm=max_norm)
    if max_norm is not None:
        norm = sum((gradient**2).sum() for gradient in whole.values()) ** 0.5
        assert result.grad_norm.item() == pytest.approx(norm, rel=1e-12)
        whole = {name: gradient * (max_norm / (norm + 1e-6)) for name, gradient in whole.items()}
    assert_exact(take_gradients(model), whole)


# Leaves outside the model get what `.backward()` of the whole batch would have given them.


@pytest.mark.parametrize("form", ["scalar", "mean"])
def test_another_model_in_the_loss_gets_its_gradient_too(form):
    generator, critic = make_model(0), nn.Linear(3, 1).double()
    both = nn.ModuleList([generator, critic])
    data = make_data()

    def loss_fn(piece):
        losses = critic(generator(piece[0])).tanh()
        return losses.mean() if form == "scalar" else Mean.of(losses)

    whole = whole_gradients(both, lambda: critic(generator(data[0])).tanh().mean())
    for batches in (1, 2):
        for _ in range(batches):
            backward(generator, loss_fn, data, micro_batch_size=3)
        assert_exact(take_gradients(both), {name: batches * gradient for name, gradient in whole.items()})


def test_an_input_that_requires_grad_gets_its_gradient():
    model, (x, y) = make_model(), make_data()
    x.requires_grad_()
    make_loss(model)((x, y)).backward()
    named = [*model.named_parameters(), ("x", x)]
    whole = take_gradients(named)
    for size in (None, 3):
        backward(model, lambda b: Mean(make_loss(model)(b) * len(b[0]), len(b[0])), (x, y), micro_batch_size=size)
        assert_exact(take_gradients(named), whole)


def test_only_the_given_parameters_are_clipped():
    model, other, data = make_model(0), make_model(1), make_data()
    both = nn.ModuleList([model, other])

    def loss_fn(piece):
        return nn.functional.cross_entropy(model(piece[0]) + other(piece[0]), piece[1])

    whole = whole_gradients(both, lambda: loss_fn(data))
    accumulator = Accumulator(model)
    accumulator.add(loss_fn(data), rows=10)
    accumulator.finish(max_norm=1e-3)
    split = take_gradients(both)
    assert_exact({k: v for k, v in split.items() if k[0] == "1"}, {k: v for k, v in whole.items() if k[0] == "1"})
    assert sum((v**2).sum() for k, v in split.items() if k[0] == "0") ** 0.5 == pytest.approx(1e-3, rel=1e-3)


def test_a_parameter_thawed_between_batches_takes_part():
    model, data = make_model(), make_data()
    accumulator = Accumulator(model, micro_batch_size=4)
    model[0].requires_grad_(False)
    accumulator.backward(make_loss(model), data)
    assert set(take_gradients(model)) == {"2.weight", "2.bias"}
    model[0].requires_grad_(True)
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    accumulator.backward(make_loss(model), data)
    assert_exact(take_gradients(model), whole)


def late(model, other, how):
    """A loss over two pieces of five rows that reaches `other` in its own way."""
    seen = []

    def loss_fn(piece):
        seen.append(piece)
        first = len(seen) % 2 == 1
        losses = model(piece[0]).square().sum(-1)
        if how == "from the second piece on" and not first:
            losses = losses * other
        if how == "from every piece, but the first counts nothing":
            return Mean(losses.sum() * other, 0 if first else 5)
        return Mean(losses.sum(), 5)

    return loss_fn


@pytest.mark.parametrize("had_gradient", [False, True])
def test_a_leaf_that_only_a_later_piece_reaches(had_gradient):
    model, (x, _) = make_model(), make_data()
    other = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    losses = lambda x: model(x).square().sum(-1)  # noqa: E731
    expected = losses(x[5:]).sum().item() / 10
    if had_gradient:
        other.grad = torch.ones_like(other)
        expected += 1
    backward(model, late(model, other, "from the second piece on"), (x, x), micro_batch_size=5)
    assert other.grad.item() == pytest.approx(expected, rel=1e-12)
    other.grad = None
    backward(model, late(model, other, "from every piece, but the first counts nothing"), (x, x), micro_batch_size=5)
    assert other.grad.item() == pytest.approx(losses(x[5:]).sum().item() / 5, rel=1e-12)


def test_a_total_that_is_itself_a_leaf():
    weight = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    backward(make_model(), lambda b: Mean(weight, 2), make_data(), micro_batch_size=5)
    assert weight.grad.item() == pytest.approx(2 / 4)


@pytest.mark.parametrize("form", ["scalar", "mean"])
def test_a_failure_restores_leaves_outside_the_model(form):
    model, (x, y) = make_model(), make_data()
    other = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    seen = []

    def loss_fn(piece):
        seen.append(piece)
        if len(seen) == 3:
            raise RuntimeError("boom")
        loss = make_loss(model)(piece) * other
        return loss if form == "scalar" else Mean(loss, 1)

    with pytest.raises(RuntimeError, match="boom"):
        backward(model, loss_fn, (x, y), micro_batch_size=3)
    assert other.grad is None


def test_a_leaf_beside_a_mean_that_only_a_sum_reaches():
    model, data = make_model(), make_data()
    other = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    loss_fn = make_loss(model)
    for _ in range(2):
        backward(
            model,
            lambda b: {"m": Mean(loss_fn(b) * len(b[0]), len(b[0])), "s": Sum(other * len(b[0]))},
            data,
            micro_batch_size=3,
        )
    assert other.grad.item() == pytest.approx(20.0)


def test_a_model_given_twice_is_one_model():
    model, data = make_model(), make_data()
    model[0].weight.grad = before = torch.ones_like(model[0].weight)
    accumulator = Accumulator([model, model, *model.parameters()], micro_batch_size=3)
    with pytest.raises(ZeroDivisionError):
        accumulator.backward(lambda b: 1 / 0, data)
    assert model[0].weight.grad is before
    model.zero_grad()
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    accumulator.backward(make_loss(model), data)
    assert_exact(take_gradients(model), whole)


@pytest.mark.parametrize("as_count", [int, torch.tensor])
def test_one_piece_is_plain_autograd_to_the_bit(as_count):
    model, data = make_model().float(), (make_data()[0].float(), make_data()[1])
    per_row = nn.CrossEntropyLoss(reduction="none")
    (per_row(model(data[0]), data[1]).sum() * torch.tensor(1 / 10)).backward()
    expected = take_gradients(model)
    backward(model, lambda b: Mean(per_row(model(b[0]), b[1]).sum(), as_count(10)), data)
    assert all((take == expected[name]).all() for name, take in take_gradients(model).items())
