"""Weight gradients summed straight into `.grad` are those that autograd sums, wherever they may be summed so."""

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from models import take_gradients, whole_gradients
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from reference import assert_exact
from wholebatch import Mean, OptionError
from wholebatch._report import tolerance
from wholebatch.torch import Accumulator
from wholebatch.torch import _formulas as formulas

ROWS, TOKENS, WIDTH, WORDS = 10, 5, 6, 11


class Language(nn.Module):
    """An embedding, linear layers of both kinds and a head, tied or not."""

    def __init__(self, *, tied=False, bias=True, conv1d=False, checkpointed=None, **embedding):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(WORDS, WIDTH, **embedding)
        self.up = Conv1D(2 * WIDTH, WIDTH) if conv1d else nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.checkpointed = checkpointed
        self.double()

    def block(self, hidden):
        return self.down(functional.gelu(self.up(hidden)))

    def forward(self, ids):
        hidden = self.tokens(ids)
        if self.checkpointed is None:
            hidden = hidden + self.block(hidden)
        else:
            hidden = hidden + checkpoint(self.block, hidden, use_reentrant=self.checkpointed)
        return self.head(self.norm(hidden))


class Twice(Language):
    """A weight that is used twice in a forward pass, by its layer and by a function."""

    def block(self, hidden):
        again = functional.linear(super().block(hidden), self.down.weight @ self.down.weight.t())
        return super().block(again)


class Penalised(Language):
    """A gradient inside the loss: the backward of a backward."""

    def forward(self, ids):
        logits = super().forward(ids)
        (slope,) = torch.autograd.grad(logits.square().mean(), self.up.weight, create_graph=True)
        return logits * (1 + slope.square().sum())


class Complex(Language):
    def __init__(self):
        super().__init__()
        self.turn = nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)

    def block(self, hidden):
        return self.turn(super().block(hidden).to(torch.complex128)).abs()


class Functional(Language):
    """Called with other parameters than its own."""

    def forward(self, ids):
        others = {name: p * 2 for name, p in self.named_parameters()}
        return torch.func.functional_call(super_forward(self), others, (ids,))


def super_forward(module):
    plain = Language()
    plain.__dict__["_parameters"] = module._parameters
    plain.__dict__["_modules"] = module._modules
    return plain


def frozen(model, *names):
    for name in names:
        model.get_submodule(name).weight.requires_grad_(False)
    return model


def hooked(model):
    model.down.weight.register_hook(lambda gradient: gradient * 3)
    model.up.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def hooked_modules(model):
    model.down.register_forward_hook(lambda module, args, output: output * 2)
    model.up.register_full_backward_hook(lambda module, of_input, of_output: (of_input[0] * 0.5,))
    return model


class Own(nn.Linear):
    """A layer that is more than what it inherits."""

    def forward(self, given):
        return 2 * super().forward(given)


def with_its_own_layer(model):
    model.down = Own(2 * WIDTH, WIDTH, dtype=torch.float64)
    return model


def parametrised(model):
    nn.utils.parametrizations.weight_norm(model.down)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Language,
    "without biases": lambda: Language(bias=False),
    "tied": lambda: Language(tied=True),
    "Conv1D": lambda: Language(conv1d=True),
    "frozen": lambda: frozen(Language(), "tokens", "down"),
    "checkpoint, reentrant": lambda: Language(checkpointed=True),
    "checkpoint, not reentrant": lambda: Language(checkpointed=False),
    "padding": lambda: Language(padding_idx=3),
    "sparse": lambda: Language(sparse=True),
    "by frequency": lambda: Language(scale_grad_by_freq=True),
    "a weight used twice": Twice,
    "a gradient in the loss": Penalised,
    "complex": Complex,
    "functional": Functional,
    "hooks on parameters": lambda: hooked(Language()),
    "hooks on modules": lambda: hooked_modules(Language()),
    "a layer with its own forward": lambda: with_its_own_layer(Language()),
    "parametrised": lambda: parametrised(Language()),
}


def make_ids(rows: int = ROWS) -> Tensor:
    return torch.randint(WORDS, (rows, TOKENS), generator=torch.Generator().manual_seed(1))


def make_loss(model: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Mean]:
    def loss_fn(ids: Tensor) -> Mean:
        logits = model(ids)
        counted = ids != 0
        return Mean((logits.logsumexp(-1) * counted).sum(), counted.sum())

    return loss_fn


@dataclass
class Watch(TorchDispatchMode):
    """Counts the tensors of a weight's size that are made."""

    shapes: set[tuple[int, ...]]
    dtype: torch.dtype
    made: list[str] = field(default_factory=list)

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        is_new = isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in given
        if is_new and tuple(out.shape) in self.shapes and out.dtype == self.dtype:
            self.made.append(str(func))
        return out


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_whole_batch(name):
    model, ids = MODELS[name](), make_ids()
    if name == "by frequency":  # counts the words of a piece, so that its gradient is not a sum over rows
        split = [take_gradients_of(model, ids, on) for on in (False, True)]
        assert_exact(split[1], split[0])
        return
    if name == "a gradient in the loss":  # of a piece's mean: not a sum over rows either
        split = [take_gradients_of(model, ids, on) for on in (False, True)]
        assert_exact(split[1], split[0])
        return
    whole = whole_gradients(model, lambda: make_loss(model)(ids).value)
    if name == "sparse":
        whole = {key: np.asarray(value) for key, value in whole.items()}
    assert_exact(take_gradients_of(model, ids, True), whole)


def take_gradients_of(model: nn.Module, ids: Tensor, on: bool) -> dict[str, np.ndarray]:
    Accumulator(model, micro_batch_size=4, in_place=on).backward(make_loss(model), ids)
    return take_gradients(model)


def test_a_sum_that_leaves_out_a_piece_is_noticed(monkeypatch):
    monkeypatch.setattr(formulas.Linear, "add", lambda module, sum, x, g: None)
    model, ids = Language(), make_ids()
    whole = whole_gradients(model, lambda: make_loss(model)(ids).value)
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(take_gradients_of(model, ids, True), whole)


def weights_made(model: nn.Module, on: bool, pieces: int, loss=make_loss, dtype=torch.float64) -> int:
    weights = {tuple(p.shape) for p in model.parameters() if p.ndim == 2}
    weights |= {shape[::-1] for shape in weights}
    accumulator = Accumulator(model, num_micro_batches=pieces, in_place=on)
    with Watch(weights, dtype) as watch:
        accumulator.backward(loss(model), make_ids())
    return len(watch.made)


def test_after_the_first_piece_no_tensor_of_a_weights_size_is_made():
    assert weights_made(Language(), True, 2) == weights_made(Language(), True, 5)


def test_without_it_each_piece_makes_all_of_them():
    assert weights_made(Language(), False, 5) - weights_made(Language(), False, 2) >= 3 * 4


def test_tied_weights_share_one_sum():
    assert weights_made(Language(tied=True), True, 5) == weights_made(Language(tied=True), True, 2)


@pytest.mark.parametrize("name", ["plain", "checkpoint, not reentrant", "Conv1D"])
def test_modules_are_as_they_were(name):
    model = MODELS[name]()
    before = {key: dict(module.__dict__) for key, module in model.named_modules()}
    take_gradients_of(model, make_ids(), True)
    assert {key: module.__dict__.keys() for key, module in model.named_modules()} == {
        key: attributes.keys() for key, attributes in before.items()
    }
    assert type(model.down).forward is nn.Linear.forward
    assert "forward" not in vars(model.down)


def test_modules_are_as_they_were_after_an_exception():
    model = Language()

    def failing(ids):
        assert "forward" in vars(model.down)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Accumulator(model, micro_batch_size=4, in_place=True).backward(failing, make_ids())
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_a_failure_after_some_pieces_leaves_gradients_as_they_were():
    model, ids, calls = Language(tied=True), make_ids(), []
    model.tokens.weight.grad = torch.ones_like(model.tokens.weight)

    def third_fails(piece):
        calls.append(piece)
        if len(calls) == 3:
            raise RuntimeError("third")
        return make_loss(model)(piece)

    with pytest.raises(RuntimeError, match="third"):
        Accumulator(model, micro_batch_size=4, in_place=True).backward(third_fails, ids)
    assert torch.equal(model.tokens.weight.grad, torch.ones_like(model.tokens.weight))
    assert model.up.weight.grad is None


def test_gradients_that_were_there_are_added_to():
    model, ids = Language(), make_ids()
    whole = whole_gradients(model, lambda: make_loss(model)(ids).value)
    for _ in range(2):
        Accumulator(model, micro_batch_size=4, in_place=True).backward(make_loss(model), ids)
    assert_exact(take_gradients(model), {name: 2 * gradient for name, gradient in whole.items()})


def test_copies_and_pickles_made_within_a_loss_are_of_the_layers_themselves():
    model, seen = Language(), []

    def loss_fn(ids):
        seen.extend([copy.deepcopy(model), pickle.loads(pickle.dumps(model))])
        seen.append(model.state_dict())
        return make_loss(model)(ids)

    Accumulator(model, micro_batch_size=5, in_place=True).backward(loss_fn, make_ids())
    ids = make_ids()
    for copied in seen[:2]:
        copied.zero_grad()
        make_loss(copied)(ids).value.backward()
        assert_exact(take_gradients(copied), whole_gradients(model, lambda: make_loss(model)(ids).value))
    assert seen[2].keys() == model.state_dict().keys()


def test_gradients_that_a_loss_takes_for_itself_are_not_added():
    model, ids = Language(), make_ids()
    whole = whole_gradients(model, lambda: make_loss(model)(ids).value)

    def loss_fn(piece):
        torch.autograd.grad(model(piece).sum(), list(model.parameters()))
        return make_loss(model)(piece)

    Accumulator(model, micro_batch_size=4, in_place=True).backward(loss_fn, ids)
    assert_exact(take_gradients(model), whole)


def test_bf16_gradients_are_summed_in_float32():
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    ones = torch.ones(1000, 1, dtype=torch.bfloat16)
    accumulator = Accumulator(layer, micro_batch_size=1, in_place=True)
    accumulator.backward(lambda piece: Mean(layer(piece).sum(), 1), ones)
    assert layer.weight.grad.item() == 1.0
    assert layer.weight.grad.dtype == torch.bfloat16


def assert_same_as_autograds(model, loss_fn, dtype, **options):
    """To what three sums in a dtype may differ by."""
    gradients = []
    for on in (False, True):
        Accumulator(model, micro_batch_size=4, in_place=on, **options).backward(loss_fn, make_ids())
        gradients.append(take_gradients(model))
    assert_exact(gradients[1], gradients[0], tolerance(torch.finfo(dtype).eps, 3))


def test_sums_may_be_wider_than_gradients():
    model = Language().float()
    assert_same_as_autograds(model, make_loss(model), torch.float32, accum_dtype=torch.float64)


def under_autocast(model, dtype=torch.bfloat16):
    def loss_fn(piece):
        with torch.autocast("cpu", dtype=dtype):
            return make_loss(model)(piece)

    return loss_fn


OF_ROWS = [
    "plain",
    "tied",
    "Conv1D",
    "without biases",
    "frozen",
    "checkpoint, reentrant",
    "checkpoint, not reentrant",
    "a weight used twice",
    "hooks on parameters",
]


@pytest.mark.parametrize("name", [*OF_ROWS, "a gradient in the loss"])
def test_in_float32_gradients_are_those_that_autograd_sums(name):
    model = MODELS[name]().float()
    assert_same_as_autograds(model, make_loss(model), torch.float32)


@dataclass
class Products(TorchDispatchMode):
    """Counts the matrix products of oneDNN."""

    seen: int = 0

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func is torch.ops.mkldnn._linear_pointwise.default
        return func(*args, **(kwargs or {}))


def products_of_onednn(model, make_loss=make_loss):
    with Products() as watch:
        Accumulator(model, micro_batch_size=5, in_place=True).backward(make_loss(model), make_ids())
    return watch.seen


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch calls another library than MKL")
def test_in_float32_products_are_onednns_unless_they_are_differentiated(monkeypatch):
    forwards_and_backwards = 2 * 3 * 2  # pieces, layers
    assert products_of_onednn(Language().float()) == forwards_and_backwards
    assert products_of_onednn(Language()) == 0
    assert products_of_onednn(Language().float(), under_autocast) == 0
    twice = products_of_onednn(Penalised().float())  # in the loss `up` is reached through `down` and the head
    assert twice == forwards_and_backwards
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
    assert products_of_onednn(Language().float()) == 0


@pytest.mark.parametrize("shape", [(7, WIDTH), (2, 3, WIDTH), (2, 0, WIDTH), (1, WIDTH), (WIDTH,), (4, 1, 2, WIDTH)])
@pytest.mark.parametrize("bias", [None, torch.arange(4.0)])
def test_products_are_the_same_for_rows_of_any_shape(shape, bias):
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=draw), torch.randn(4, WIDTH, generator=draw)
    wide = torch.randn(*shape[:-1], 2 * WIDTH, generator=draw)[..., ::2]
    with torch.no_grad():
        for given, factor in ((x, weight), (wide, weight), (x, weight.t().contiguous().t())):
            expected = functional.linear(given.double(), factor.double(), None if bias is None else bias.double())
            product = formulas._linear(given, factor, bias)
            assert product.is_contiguous()
            torch.testing.assert_close(product, expected.float())


@pytest.mark.parametrize("name", OF_ROWS)
def test_under_autocast_gradients_are_those_that_autograd_sums(name):
    model = MODELS[name]().float()
    assert_same_as_autograds(model, under_autocast(model), torch.bfloat16)


def test_under_autocast_no_tensor_of_a_weights_size_is_made_in_the_sums_dtype():
    made = {}
    for on in (False, True):
        made[on] = [weights_made(Language().float(), on, pieces, under_autocast, torch.float32) for pieces in (2, 5)]
    assert made[True][0] == made[True][1]
    assert made[False][1] - made[False][0] >= 3 * 3


def test_under_autocast_a_gradient_in_the_loss_is_differentiated():
    model = Penalised().float()
    assert_same_as_autograds(model, under_autocast(model), torch.bfloat16)


def test_under_autocast_a_cast_weight_is_not_kept_for_others():
    model, ids = Twice().float(), make_ids(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        Accumulator(model, micro_batch_size=2, in_place=True).backward(make_loss(model), ids)
        inside = take_gradients(model)
    Accumulator(model, micro_batch_size=2, in_place=False).backward(under_autocast(model), ids)
    assert_exact(inside, take_gradients(model), tolerance(torch.finfo(torch.bfloat16).eps, 3))


class Attending(Language):
    """A layer whose own output projection is used as a function."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dtype=torch.float64)

    def block(self, hidden):
        return super().block(self.attention(hidden, hidden, hidden)[0])


class ByKeyword(Language):
    def block(self, hidden):
        return self.down(input=functional.gelu(self.up(input=hidden)))


class Shared(Language):
    """One module in two places."""

    def __init__(self):
        super().__init__()
        self.again = self.down

    def block(self, hidden):
        return self.again(functional.gelu(self.up(super().block(hidden))))


class Adapted(Language):
    """A frozen layer beside two narrow ones that are trained."""

    def __init__(self):
        super().__init__()
        self.up.requires_grad_(False)
        self.narrow = nn.Linear(WIDTH, 2, bias=False, dtype=torch.float64)
        self.wide = nn.Linear(2, 2 * WIDTH, bias=False, dtype=torch.float64)

    def block(self, hidden):
        return self.down(functional.gelu(self.up(hidden) + self.wide(self.narrow(hidden))))


class Looking(Language):
    """Calls its layers without a graph, too."""

    def block(self, hidden):
        with torch.no_grad():
            seen = self.down(self.up(hidden))
        with torch.inference_mode():
            self.down(self.up(hidden.detach()))
        return super().block(hidden + seen)


class Replaced(Language):
    """A layer whose forward somebody has replaced."""

    def __init__(self):
        super().__init__()
        own = self.down.forward
        self.down.forward = lambda given: 3 * own(given)


class ByVmap(Language):
    def block(self, hidden):
        return torch.func.vmap(super().block)(hidden)


MORE = {
    "attention": Attending,
    "by keyword": ByKeyword,
    "shared": Shared,
    "adapted": Adapted,
    "looking": Looking,
    "replaced": Replaced,
    "by vmap": ByVmap,
    "in a wrapper for several devices": lambda: Wrapped(),
    "old weight_norm": lambda: normed(Language()),
}


def normed(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is on its way out
        nn.utils.weight_norm(model.down)
    return model


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.DataParallel(Language())

    def forward(self, ids):
        return self.inner(ids)


@pytest.mark.parametrize("name", MORE)
def test_gradients_are_those_of_the_whole_batch_in_layers_used_otherwise(name):
    model, ids = MORE[name](), make_ids()
    whole = whole_gradients(model, lambda: make_loss(model)(ids).value)
    assert_exact(take_gradients_of(model, ids, True), whole)


def test_a_hook_that_comes_between_forward_and_backward_sees_the_gradient():
    model, ids, seen = Language(), make_ids(), []

    def loss_fn(piece):
        loss = make_loss(model)(piece)
        model.down.weight.register_hook(lambda gradient: seen.append(gradient.shape))
        return loss

    Accumulator(model, num_micro_batches=2, in_place=True).backward(loss_fn, ids)
    assert len(seen) == 1 + 2


def test_a_model_without_storage_is_summed_too():
    model, ids = Language().float().to("meta"), make_ids().to("meta")
    Accumulator(model, num_micro_batches=2, in_place=True, on_nonfinite="keep").backward(
        lambda piece: Mean(model(piece).sum(), len(piece)), ids
    )
    assert model.down.weight.grad.device.type == "meta"


def test_a_forward_that_a_loss_puts_in_the_place_of_ours_is_left_there():
    model = Language()

    def loss_fn(ids):
        model.down.forward = forward
        return make_loss(model)(ids)

    forward = lambda given: nn.functional.linear(given, model.down.weight)  # noqa: E731
    Accumulator(model, num_micro_batches=2, in_place=True).backward(loss_fn, make_ids())
    assert model.down.forward is forward
    assert "forward" not in vars(model.up)


def test_a_compiled_loss_is_compiled_once():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model, ids, counter = Language(), make_ids(8), CompileCounter()
    compiled = torch.compile(lambda piece: functional.cross_entropy(model(piece)[:, 0], piece[:, 0]), backend=counter)
    accumulator = Accumulator(model, micro_batch_size=4, in_place=True)
    for _ in range(3):
        accumulator.backward(compiled, ids)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_small_weights_are_left_to_autograd_unless_asked_for():
    model, seen = Language(), []

    def loss_fn(ids):
        seen.append({name for name, module in model.named_modules() if "forward" in vars(module)})
        return make_loss(model)(ids)

    for option in ("auto", True):
        Accumulator(model, micro_batch_size=5, in_place=option).backward(loss_fn, make_ids())
    assert seen == [set()] * 2 + [{"tokens", "up", "down", "head"}] * 2


def test_large_weights_are_summed_in_place_where_there_are_several_pieces(monkeypatch):
    monkeypatch.setattr("wholebatch.torch._accumulator.WORTH_IT", WIDTH * WORDS)
    model, seen = Language(), []

    def loss_fn(ids):
        seen.append("forward" in vars(model.head))
        return make_loss(model)(ids)

    for pieces in (1, 2):
        Accumulator(model, num_micro_batches=pieces).backward(loss_fn, make_ids())
    assert seen == [False, True, True]


def test_an_option_that_is_none_is_refused():
    with pytest.raises(OptionError, match='in_place must be True, False or "auto", got None'):
        Accumulator(nn.Linear(1, 1), in_place=None)
