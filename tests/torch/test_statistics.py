"""BatchNorm and its kin: refused by name, or normalised per piece with statistics of the whole batch."""

import warnings

import pytest
import torch
import transformers as hf
from models import make_data, make_loss, make_model, take_gradients, whole_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from reference import assert_exact
from wholebatch import BatchNormError, WholeBatchError
from wholebatch.torch import Accumulator, Window, backward, check

ROWS = 10


def images(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 3, 5, 5, generator=generator, dtype=torch.float64) * 3 + 2


def first_layer(layer):
    """A model whose statistics do not depend on how other layers were normalised, so the whole batch's are exact."""
    torch.manual_seed(0)
    return nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(3)).double()


def prepared(layer, x):
    model = first_layer(layer)
    with torch.no_grad():
        model.eval()(x)
    return model.train()


def buffers(model):
    return {name: buffer.double().numpy().copy() for name, buffer in model.named_buffers()}


def mean_square(model):
    return lambda x: model(x).square().mean()


LAYERS = {
    "BatchNorm2d": lambda: nn.BatchNorm2d(3),
    "cumulative average": lambda: nn.BatchNorm2d(3, momentum=None),
    "momentum 1": lambda: nn.BatchNorm2d(3, momentum=1.0),
    "not affine": lambda: nn.BatchNorm2d(3, affine=False),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(3),
    "LazyBatchNorm2d": lambda: nn.LazyBatchNorm2d(),
    "InstanceNorm2d that tracks": lambda: nn.InstanceNorm2d(3, track_running_stats=True),
    "LazyInstanceNorm2d that tracks": lambda: nn.LazyInstanceNorm2d(track_running_stats=True),
}
RUN_ON_THE_CPU = [name for name in LAYERS if name != "SyncBatchNorm"]


def model_of(name):
    if name == "SyncBatchNorm":  # its forward wants a GPU; it is refused before that
        return nn.Sequential(LAYERS[name](), nn.Flatten(), nn.Linear(75, 3)).double()
    return prepared(LAYERS[name](), images())


@pytest.mark.parametrize("name", LAYERS)
def test_training_mode_is_refused_by_name(name):
    model = model_of(name)
    kind = type(model[0]).__name__
    with pytest.raises(WholeBatchError, match=rf'0 \({kind}\).*batch_norm="micro".*\.eval\(\).*GroupNorm'):
        backward(model, mean_square(model), images(), micro_batch_size=4)


def test_every_layer_is_named_and_only_those_in_the_way():
    model = nn.ModuleDict({"a": nn.BatchNorm1d(3), "b": nn.BatchNorm1d(3).eval(), "c": nn.InstanceNorm1d(3)})
    model["d"] = nn.Sequential(nn.BatchNorm1d(3))
    with pytest.raises(WholeBatchError, match=r"^a \(BatchNorm1d\), d\.0 \(BatchNorm1d\): "):
        backward(model, lambda x: None, images(), micro_batch_size=4)


@pytest.mark.parametrize("name", RUN_ON_THE_CPU)
def test_eval_mode_is_no_obstacle(name):
    model, x = model_of(name).eval(), images()
    before = buffers(model)
    whole = whole_gradients(model, lambda: mean_square(model)(x))
    backward(model, mean_square(model), x, micro_batch_size=4)
    assert_exact(take_gradients(model), whole)
    assert all((buffers(model)[name] == before[name]).all() for name in before)


def test_one_piece_is_the_whole_batch():
    model, x = model_of("BatchNorm2d"), images()
    twin = model_of("BatchNorm2d")
    whole = whole_gradients(twin, lambda: mean_square(twin)(x))
    backward(model, mean_square(model), x)
    assert_exact(take_gradients(model), whole)
    assert_exact(buffers(model), buffers(twin))


def test_without_running_statistics_eval_mode_is_an_obstacle_too():
    model = prepared(nn.BatchNorm2d(3, track_running_stats=False), images()).eval()
    with pytest.raises(WholeBatchError, match=r"0 \(BatchNorm2d\)"):
        backward(model, mean_square(model), images(), micro_batch_size=4)
    with pytest.warns(UserWarning, match="normalised by the statistics of each piece"):
        backward(model, mean_square(model), images(), micro_batch_size=4, batch_norm="micro")


@pytest.mark.parametrize("name", RUN_ON_THE_CPU)
@pytest.mark.parametrize("size", [1, 3, 4, 5, 10])
def test_running_statistics_follow_the_whole_batch_once(name, size):
    model, twin = model_of(name), model_of(name)
    accumulator = Accumulator(model, micro_batch_size=size, batch_norm="micro")
    for batch in range(3):
        x = images() * (batch + 1)
        with torch.no_grad():
            twin(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accumulator.backward(mean_square(model), x)
    assert_exact(buffers(model), buffers(twin))
    assert model[0].momentum == twin[0].momentum
    assert not model[0]._forward_pre_hooks


def naive(model, x, pooled):
    """Statistics updated per piece; or averaged without the difference between the pieces' means."""
    layer = model[0]
    if not pooled:
        for piece in x.split(5):
            model(piece)
        return
    means, variances = zip(
        *((piece.mean((0, 2, 3)), piece.var((0, 2, 3), unbiased=False)) for piece in x.split(5)), strict=True
    )
    n = x.numel() // 3
    layer.running_mean.lerp_(torch.stack(means).mean(0), 0.1)
    layer.running_var.lerp_(torch.stack(variances).mean(0) * n / (n - 1), 0.1)
    layer.num_batches_tracked += 1


@pytest.mark.parametrize("pooled", [False, True], ids=["per piece", "without the term between pieces"])
def test_naive_statistics_fail_the_same_comparison(pooled):
    model, twin, x = model_of("BatchNorm2d"), model_of("BatchNorm2d"), images()
    x[:5] += 5
    with torch.no_grad():
        twin(x)
        naive(model, x, pooled)
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(buffers(model), buffers(twin), tolerance=1e-3)


class Shared(nn.Module):
    """One layer called twice per piece, once more by a checkpoint that computes it again."""

    def __init__(self, recompute):
        super().__init__()
        self.norm = nn.BatchNorm2d(3).double()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.recompute = recompute

    def forward(self, x):
        first = self.norm(x)
        second = checkpoint(self.norm, x * 2 + 1, use_reentrant=False) if self.recompute else self.norm(x * 2 + 1)
        return first * self.weight + second


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.filterwarnings("ignore:norm. normalised by the statistics")
def test_a_layer_called_several_times_is_pooled_call_by_call(recompute):
    model, twin, x = Shared(recompute), Shared(recompute), images()
    mean_square(twin)(x).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Accumulator(model, micro_batch_size=4, batch_norm="micro").backward(mean_square(model), x)
    assert_exact(buffers(model), buffers(twin))


def test_micro_warns_once():
    model = model_of("BatchNorm2d")
    accumulator = Accumulator(model, micro_batch_size=4, batch_norm="micro")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            accumulator.backward(mean_square(model), images())
    (warning,) = caught
    assert str(warning.message).startswith("0: normalised by the statistics of each piece")
    assert warning.filename == __file__


def test_a_model_that_is_the_layer_itself_is_called_the_model():
    norm, x = nn.BatchNorm1d(4), torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    refused = pytest.raises(BatchNormError, match=r"^the model \(BatchNorm1d\)")
    warned = pytest.warns(UserWarning, match="^the model: normalised")
    for option, told in {"refuse": refused, "micro": warned}.items():
        with told:
            Accumulator(norm, micro_batch_size=2, batch_norm=option).backward(lambda piece: norm(piece).mean(), x)


def test_a_failing_piece_restores_statistics_momentum_and_hooks():
    model, x = model_of("BatchNorm2d"), images()
    before = buffers(model)
    seen = []

    def loss_fn(piece):
        loss = mean_square(model)(piece)
        seen.append(piece)
        if len(seen) == 2:
            raise RuntimeError("boom")
        return loss

    with pytest.warns(UserWarning, match="each piece"), pytest.raises(RuntimeError, match="boom"):
        backward(model, loss_fn, x, micro_batch_size=4, batch_norm="micro")
    assert all((buffers(model)[name] == before[name]).all() for name in before)
    assert model[0].momentum == 0.1
    assert not model[0]._forward_pre_hooks


@pytest.mark.parametrize("policy", ["refuse", "micro"])
def test_loops_that_call_the_model_themselves_are_refused(policy):
    model, data = nn.Sequential(make_model(), nn.BatchNorm1d(3).double()), make_data()
    accumulator = Accumulator(model, batch_norm=policy)
    with pytest.raises(WholeBatchError, match=r'batch_norm="micro".*with \.backward or \.step'):
        accumulator.add(make_loss(model)(data), rows=10)
    model.eval()
    accumulator.add(make_loss(model)(data), rows=10)
    accumulator.finish()


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match='batch_norm must be "refuse" or "micro", got \'ignore\''):
        Accumulator(make_model(), batch_norm="ignore")


def test_check_sees_what_a_split_would_do():
    model = model_of("BatchNorm2d")
    assert not check(model, mean_square(model), images()).exact
    assert check(model.eval(), mean_square(model), images()).exact


def resnet():
    torch.manual_seed(0)
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    return hf.ResNetForImageClassification(config).double()


def resnet_batch():
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(6, 3, 32, 32, generator=generator, dtype=torch.float64),
        "labels": torch.randint(3, (6,), generator=generator),
    }


def test_a_resnet_is_refused_accepted_and_exact_when_frozen():
    model, batch = resnet(), resnet_batch()
    loss_fn = lambda piece: model(**piece).loss  # noqa: E731
    with pytest.raises(WholeBatchError, match=r"resnet\.embedder\.embedder\.normalization \(BatchNorm2d\), "):
        backward(model, loss_fn, batch, micro_batch_size=2)

    stem = model.resnet.embedder.embedder.normalization
    with torch.no_grad():
        seen = model.resnet.embedder.embedder.convolution(batch["pixel_values"])
    with pytest.warns(UserWarning, match="normalised by the statistics of each piece"):
        backward(model, loss_fn, batch, micro_batch_size=2, batch_norm="micro")
    assert torch.allclose(stem.running_mean, 0.1 * seen.mean((0, 2, 3)), rtol=0, atol=1e-12)
    assert torch.allclose(stem.running_var, 0.9 + 0.1 * seen.var((0, 2, 3)), rtol=0, atol=1e-12)
    assert {int(m.num_batches_tracked) for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {1}

    model.zero_grad()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    whole = whole_gradients(model, lambda: loss_fn(batch))
    backward(model, loss_fn, batch, micro_batch_size=2)
    assert_exact(take_gradients(model), whole)


@pytest.mark.filterwarnings("ignore:0. normalised by the statistics", "ignore:_orig_mod")
def test_a_compiled_model_is_followed_too():
    torch._dynamo.reset()
    model, twin, x = model_of("BatchNorm2d"), model_of("BatchNorm2d"), images()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(x)
        twin(x)
        twin(x)
    Accumulator(compiled, micro_batch_size=4, batch_norm="micro").backward(mean_square(compiled), x)
    assert_exact(buffers(model), buffers(twin))


def test_a_lazy_model_has_to_be_called_once():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(WholeBatchError, match="parameters without a shape yet: lazy modules have"):
        backward(model, mean_square(model), torch.ones(4, 2))


def test_a_layer_that_is_named_twice_is_followed_once():
    model, twin, x = model_of("BatchNorm2d"), model_of("BatchNorm2d"), images()
    with torch.no_grad():
        twin(x)
    with pytest.warns(UserWarning, match="each piece"):
        Accumulator([model, model[0]], micro_batch_size=4, batch_norm="micro").backward(mean_square(model), x)
    assert_exact(buffers(model), buffers(twin))
    assert model[0].momentum == 0.1


def test_a_call_in_eval_mode_adds_nothing_and_sees_the_statistics_of_before():
    model, twin, x = model_of("BatchNorm2d"), model_of("BatchNorm2d"), images()
    with torch.no_grad():
        twin(x)
        expected = model.eval()(x[:4])
        model.train()
    seen = []

    def loss_fn(piece):
        loss = mean_square(model)(piece)
        model.eval()
        with torch.no_grad():
            seen.append(model(x[:4]))
        model.train()
        return loss

    with pytest.warns(UserWarning, match="each piece"):
        Accumulator(model, micro_batch_size=4, batch_norm="micro").backward(loss_fn, x)
    assert_exact(buffers(model), buffers(twin))
    assert all(torch.allclose(one, expected) for one in seen)


@pytest.mark.parametrize("policy", ["refuse", "micro"])
def test_scripted_layers_are_refused(policy):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is on its way out
        model = torch.jit.script(model_of("BatchNorm2d"))
    with pytest.raises(WholeBatchError, match=r"0 \("):
        backward(model, mean_square(model), images(), micro_batch_size=4, batch_norm=policy)


def test_layers_without_a_counter_and_failures_on_the_way():
    model, x = nn.Sequential(model_of("BatchNorm2d")[0], nn.BatchNorm2d(3).double()), images()
    model[1].num_batches_tracked = None
    with pytest.warns(UserWarning, match="each piece"):
        Accumulator(model, micro_batch_size=4, batch_norm="micro").backward(mean_square(model), x)
    assert [layer.momentum for layer in model] == [0.1, 0.1]
    assert model[0].num_batches_tracked == 1


def test_a_piece_of_no_rows_adds_no_statistics():
    model, twin, x = model_of("BatchNorm2d"), model_of("BatchNorm2d"), images()
    with torch.no_grad():
        twin(x)
    with pytest.warns(UserWarning, match="each piece"):
        Accumulator(model, batch_norm="micro").backward(mean_square(model), Window([x[:4], x[:0], x[4:]]))
    assert_exact(buffers(model), buffers(twin))
