"""Losses that people write: what `check` is to say about each. None is a sound one."""

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from wholebatch import Mean, Sum
from wholebatch.torch import token_mean

ROWS, CLASSES, LENGTH = 12, 3, 6


@dataclass(frozen=True)
class Case:
    """A cause, and what makes a fresh `(model, loss_fn, batch)`."""

    cause: str | None
    make: Callable[[], tuple[Any, Any, Any]]


CASES: dict[str, Case] = {}


def case(cause, name):
    def note(make):
        def fresh():
            torch.manual_seed(0)
            return make()

        CASES[name] = Case(cause, fresh)
        return make

    return note


def rows(dtype=torch.float32, count=ROWS):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator)
    return {"x": x.to(dtype), "y": torch.randint(CLASSES, (count,), generator=generator)}


def tokens(count=ROWS):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 11, (count, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (count,), generator=generator)
    mask = torch.arange(LENGTH) < lengths[:, None]
    return {"ids": ids, "mask": mask.float(), "labels": ids.masked_fill(~mask, -100)}


def mlp(*between):
    return nn.Sequential(nn.Linear(4, 8), *between, nn.Tanh(), nn.Linear(8, CLASSES))


class Tokens(nn.Module):
    """A language model in which a position sees those before it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, ids):
        return self.head(self.embedding(ids).cumsum(-2).tanh())


def cross_entropy(model, **options):
    return lambda b: F.cross_entropy(model(b["x"]), b["y"], **options)


def over_rows(cause, name, loss, make_model=mlp, batch=rows):
    """A case whose loss is a function of the model and the batch."""

    @case(cause, name)
    def make():
        model = make_model()
        return model, lambda b: loss(model, b), batch()


def token_losses(model, b):
    return F.cross_entropy(model(b["ids"]).transpose(1, 2), b["labels"], reduction="none")


def logits(model, b):
    return model(b["x"])


def losses(model, b, **options):
    return F.cross_entropy(logits(model, b), b["y"], reduction="none", **options)


# sound

over_rows(None, "a mean over rows", lambda m, b: losses(m, b).mean())
over_rows(
    None, "a float64 model", lambda m, b: losses(m, b).mean(), lambda: mlp().double(), lambda: rows(torch.float64)
)
over_rows(
    None, "a bfloat16 model", lambda m, b: losses(m, b).mean(), lambda: mlp().bfloat16(), lambda: rows(torch.bfloat16)
)
over_rows(None, "four rows", lambda m, b: losses(m, b).mean(), batch=lambda: rows(count=4))
over_rows(None, "two rows", lambda m, b: losses(m, b).mean(), batch=lambda: rows(count=2))
over_rows(None, "64 rows", lambda m, b: losses(m, b).mean(), batch=lambda: rows(count=64))
over_rows(None, "a mean given as a ratio", lambda m, b: Mean.of(losses(m, b)))
over_rows(None, "a sum", lambda m, b: Sum(losses(m, b).sum()))
over_rows(None, "a weighted ratio", lambda m, b: Mean.of(losses(m, b), where=b["x"][:, 0].abs()))
over_rows(
    None,
    "class weights as a ratio",
    lambda m, b: Mean(
        F.cross_entropy(logits(m, b), b["y"], weight=torch.tensor([1.0, 5, 25]).to(b["x"]), reduction="sum"),
        torch.tensor([1.0, 5, 25]).to(b["x"])[b["y"]].sum(),
    ),
)
over_rows(
    None,
    "several terms",
    lambda m, b: {
        "nll": Mean.of(losses(m, b), where=b["y"] > 0),
        "size": 0.1 * Mean.of(logits(m, b).square()),
        "l2": Sum(logits(m, b).square().sum()),
    },
)
over_rows(
    None, "a penalty on weights", lambda m, b: losses(m, b).mean() + sum(p.square().sum() for p in m.parameters())
)
over_rows(
    None,
    "metrics beside",
    lambda m, b: (losses(m, b).mean(), {"right": (logits(m, b).argmax(-1) == b["y"]).float().mean()}),
)
over_rows(None, "dropout in eval mode", lambda m, b: losses(m, b).mean(), lambda: mlp(nn.Dropout(0.5)).eval())
over_rows(None, "dropout of nothing", lambda m, b: losses(m, b).mean(), lambda: mlp(nn.Dropout(0.0)))
over_rows(None, "BatchNorm in eval mode", lambda m, b: losses(m, b).mean(), lambda: mlp(nn.BatchNorm1d(8)).eval())
over_rows(
    None, "GroupNorm and LayerNorm", lambda m, b: losses(m, b).mean(), lambda: mlp(nn.GroupNorm(2, 8), nn.LayerNorm(8))
)
over_rows(None, "a normalised row", lambda m, b: losses(m, {**b, "x": F.normalize(b["x"], dim=1)}).mean())
over_rows(None, "token means as a ratio", lambda m, b: token_mean(m(b["ids"]), b["labels"]), Tokens, tokens)
over_rows(
    None,
    "masked means as a ratio",
    lambda m, b: Mean((m(b["ids"]).square().mean(-1) * b["mask"]).sum(), b["mask"].sum()),
    Tokens,
    tokens,
)
over_rows(
    None,
    "a mean of each row's mean",
    lambda m, b: (token_losses(m, b).sum(1) / b["mask"].sum(1)).mean(),
    Tokens,
    tokens,
)
over_rows(
    None,
    "tied weights",
    lambda m, b: token_mean(F.linear(m.embedding(b["ids"]), m.embedding.weight), b["labels"]),
    Tokens,
    tokens,
)
over_rows(
    None, "sorting within a row", lambda m, b: logits(m, b).sort(-1).values.mul(torch.arange(3).to(b["x"])).mean()
)
over_rows(
    None, "a constant tensor outside", lambda m, b: losses(m, {**b, "x": b["x"] * torch.arange(4).to(b["x"])}).mean()
)


over_rows(None, "the largest logit of a row", lambda m, b: logits(m, b).max(-1).values.mean())


@case(None, "attention with a mask")
def attention():
    layer, head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 11)
    embedding = nn.Embedding(11, 6)

    def loss_fn(b):
        x = embedding(b["ids"])
        out, _ = layer(x, x, x, key_padding_mask=b["mask"] == 0, need_weights=False)
        return token_mean(head(out), b["labels"])

    return [layer, head, embedding], loss_fn, tokens()


@case(None, "buffers that change and are not used")
def unused_buffer():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return self.inner(x)

    model = Counting()
    return model, cross_entropy(model), rows()


@case(None, "a Python counter that is not used")
def unused_counter():
    model, calls = mlp(), itertools.count()

    def loss_fn(b):
        next(calls)
        return cross_entropy(model)(b)

    return model, loss_fn, rows()


@case(None, "noise that comes with the batch")
def noise_in_the_batch():
    model = mlp()
    return (
        model,
        lambda b: cross_entropy(model)({**b, "x": b["x"] + b["noise"]}),
        {**rows(), "noise": torch.randn(ROWS, 4)},
    )


@case(None, "a recurrent net")
def recurrent():
    model = nn.LSTM(4, 5, batch_first=True)
    return model, lambda x: model(x)[0].square().mean(), torch.randn(ROWS, LENGTH, 4)


@case("rounding", "a loss in bfloat16")
def in_bfloat16():
    model, narrow = mlp(), nn.Linear(CLASSES, CLASSES)

    def loss_fn(b):
        return F.cross_entropy(F.linear(model(b["x"]).bfloat16(), narrow.weight.bfloat16()), b["y"])

    return [model, narrow], loss_fn, rows()


@case("rounding", "a loss that insists on float32")
def in_float32():
    model = mlp()

    def loss_fn(b):
        assert b["x"].dtype == torch.float32, "half of a fused kernel"
        return cross_entropy(model)(b)

    return model, loss_fn, rows(count=64)


# means of means

over_rows(
    "mean-of-means",
    "a token mean as a scalar",
    lambda m, b: F.cross_entropy(m(b["ids"]).reshape(-1, 11), b["labels"].reshape(-1), ignore_index=-100),
    Tokens,
    tokens,
)
over_rows(
    "mean-of-means",
    "a token mean as a scalar, four rows",
    lambda m, b: token_mean(m(b["ids"]), b["labels"]).value,
    Tokens,
    lambda: tokens(4),
)
over_rows(
    "mean-of-means",
    "a masked mean as a scalar",
    lambda m, b: (m(b["ids"]).square().mean(-1) * b["mask"]).sum() / b["mask"].sum(),
    Tokens,
    tokens,
)
over_rows(
    "mean-of-means",
    "a masked mean with a clamp",
    lambda m, b: (
        (m(b["ids"]).square().mean(-1) * b["mask"]).sum() / b["mask"].sum().clamp(min=1)
        + 0.1 * sum(p.square().sum() for p in m.parameters())
    ),
    Tokens,
    tokens,
)
over_rows(
    "mean-of-means",
    "class weights",
    lambda m, b: F.cross_entropy(logits(m, b), b["y"], weight=torch.tensor([1.0, 5, 25]).to(b["x"])),
)
over_rows("mean-of-means", "weights", lambda m, b: (losses(m, b) * b["x"][:, 0].abs()).sum() / b["x"][:, 0].abs().sum())
over_rows(
    "mean-of-means", "rows that are ignored", lambda m, b: F.cross_entropy(logits(m, b), b["y"].where(b["y"] > 0, -100))
)
over_rows("mean-of-means", "chosen rows", lambda m, b: logits(m, b)[b["x"][:, 0] > 0].square().mean())
over_rows("mean-of-means", "a mean over one", lambda m, b: Mean(losses(m, b).mean(), 1))
over_rows(
    "mean-of-means",
    "a token mean times rows",
    lambda m, b: Mean(token_mean(m(b["ids"]), b["labels"]).value * len(b["ids"]), len(b["ids"])),
    Tokens,
    tokens,
)
over_rows(
    "mean-of-means",
    "one term of several",
    lambda m, b: {"nll": token_mean(m(b["ids"]), b["labels"]).value, "size": 0.1 * Mean.of(m(b["ids"]).square())},
    Tokens,
    tokens,
)


over_rows(
    "mean-of-means",
    "two token means in one",
    lambda m, b: (
        token_mean(m(b["ids"]), b["labels"]).value
        + 0.3 * token_mean(m(b["ids"]), b["labels"].where(b["ids"] % 3 > 0, -100)).value
    ),
    Tokens,
    tokens,
)
over_rows(
    "mean-of-means",
    "a class-weighted mean and a mean over rows",
    lambda m, b: (
        F.cross_entropy(logits(m, b), b["y"], weight=torch.tensor([1.0, 5, 25]).to(b["x"])) + losses(m, b).mean()
    ),
)


@case("mean-of-means", "one padded row of many")
def one_padded_row():
    model = Tokens()
    ids = torch.randint(1, 11, (64, LENGTH))
    labels = ids.clone()
    labels[37, 1:] = -100
    return model, lambda b: token_mean(model(b["ids"]), b["labels"]).value, {"ids": ids, "labels": labels}


# sums

over_rows("sum-as-mean", "a sum as a scalar", lambda m, b: losses(m, b).sum())
over_rows("sum-as-mean", "a sum over a fixed number", lambda m, b: logits(m, b).square().sum() / 64)
over_rows("sum-as-mean", "a sum as a scalar, two rows", lambda m, b: losses(m, b).sum(), batch=lambda: rows(count=2))
over_rows(
    "sum-as-mean",
    "a sum and a penalty",
    lambda m, b: losses(m, b).sum() + sum(p.square().sum() for p in m.parameters()),
)
over_rows("sum-as-mean", "a mean and a sum", lambda m, b: losses(m, b).mean() + 0.1 * logits(m, b).square().sum())
over_rows("sum-as-mean", "a sum over a fixed count", lambda m, b: Mean(losses(m, b).sum(), ROWS))
over_rows("sum-as-mean", "a sum over tokens", lambda m, b: token_losses(m, b).sum(), Tokens, tokens)

# means as totals

over_rows("mean-as-total", "a mean over the rows", lambda m, b: Mean(losses(m, b).mean(), len(b["y"])))
over_rows(
    "mean-as-total",
    "a mean over the rows, mse",
    lambda m, b: Mean(F.mse_loss(logits(m, b), b["x"][:, :3]), len(b["x"])),
)
over_rows(
    "mean-as-total",
    "a token mean over the tokens",
    lambda m, b: Mean(token_mean(m(b["ids"]), b["labels"]).value, token_mean(m(b["ids"]), b["labels"]).count),
    Tokens,
    tokens,
)
over_rows("mean-as-total", "a mean as a Sum", lambda m, b: Sum(losses(m, b).mean()))
over_rows(
    "mean-as-total",
    "a penalty in a total",
    lambda m, b: Mean(losses(m, b).sum() + sum(p.square().sum() for p in m.parameters()), len(b["y"])),
)

# batch statistics

over_rows("batch-statistics", "BatchNorm1d", lambda m, b: losses(m, b).mean(), lambda: mlp(nn.BatchNorm1d(8)))
over_rows(
    "batch-statistics",
    "BatchNorm1d without running statistics",
    lambda m, b: losses(m, b).mean(),
    lambda: mlp(nn.BatchNorm1d(8, track_running_stats=False)),
)
over_rows(
    "batch-statistics",
    "BatchNorm1d at the end",
    lambda m, b: logits(m, b).square().mean(),
    lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
)
over_rows(
    "batch-statistics",
    "a batch norm that is a function",
    lambda m, b: losses(m, {**b, "x": F.batch_norm(b["x"], None, None, training=True)}).mean(),
)


@case("batch-statistics", "BatchNorm2d in a convolutional net")
def convolutional():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES))
    return model, cross_entropy(model), {"x": torch.randn(ROWS, 2, 4, 4), "y": rows()["y"]}


@case("batch-statistics", "a batch norm of one's own")
def own_batch_norm():
    class Norm(nn.Module):
        def forward(self, x):
            return (x - x.mean(0)) / (x.std(0) + 1e-5) if self.training else x

    model = mlp(Norm())
    return model, cross_entropy(model), rows()


# randomness

over_rows("randomness", "dropout", lambda m, b: losses(m, b).mean(), lambda: mlp(nn.Dropout(0.5)))
over_rows(
    "randomness",
    "a little dropout, few rows",
    lambda m, b: losses(m, b).mean(),
    lambda: mlp(nn.Dropout(0.1)),
    lambda: rows(count=4),
)
over_rows(
    "randomness", "noise in the loss", lambda m, b: losses(m, {**b, "x": b["x"] + torch.randn_like(b["x"])}).mean()
)
over_rows("randomness", "Gumbel noise", lambda m, b: (F.gumbel_softmax(logits(m, b), tau=0.5) * b["x"][:, :3]).mean())
over_rows(
    "randomness",
    "so much dropout that few draws leave a gradient",
    lambda m, b: F.dropout(logits(m, b), 0.9).square().mean(),
)
over_rows(
    "randomness",
    "noise for the rows of a class, of which a piece may have none",
    lambda m, b: (
        losses(m, b)
        * torch.ones_like(b["x"][:, 0]).masked_scatter(b["y"] == 0, torch.randn(int((b["y"] == 0).sum())).to(b["x"]))
    ).mean(),
)
over_rows(
    "randomness",
    "dropout as it is on GPUs",
    lambda m, b: torch.native_dropout(logits(m, b), 0.5, True)[0].square().mean(),
)


@case("randomness", "a layer that is seldom left out")
def seldom_left_out():
    model = mlp()

    def loss_fn(b):
        return cross_entropy(model)({**b, "x": b["x"] * 0.5 if torch.rand(()) < 0.35 else b["x"]})

    torch.manual_seed(10)  # with which two runs are alike, and the third is not
    return model, loss_fn, rows()


over_rows("randomness", "Python's random numbers", lambda m, b: losses(m, b).mean() * __import__("random").random())
over_rows(
    "randomness", "NumPy's random numbers", lambda m, b: losses(m, b).mean() * float(__import__("numpy").random.rand())
)
over_rows(
    "randomness",
    "a token mean with dropout as a ratio",
    lambda m, b: token_mean(m[1].head(F.dropout(m[0](b["ids"]), 0.2)), b["labels"]),
    lambda: nn.ModuleList([nn.Embedding(11, 6), Tokens()]),
    tokens,
)


@case("randomness", "dropout within a recurrent net, where time is first")
def recurrent_dropout():
    model = nn.GRU(4, 8, num_layers=2, dropout=0.3, batch_first=True)
    return model, lambda x: model(x)[0].square().mean(), torch.randn(ROWS, LENGTH, 4)


@case("randomness", "a generator of its own")
def own_generator():
    model, generator = mlp(), torch.Generator().manual_seed(0)
    return (
        model,
        lambda b: losses(model, {**b, "x": b["x"] + torch.randn(b["x"].shape, generator=generator)}).mean(),
        rows(),
    )


@case("randomness", "a generator of NumPy's of its own")
def own_numpy_generator():
    model, generator = mlp(), np.random.default_rng(0)
    return model, lambda b: losses(model, b).mean() * generator.random(), rows()


@case("randomness", "generators that modules hold")
def generators_of_modules():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.generators = mlp(), {"depth": random.Random(0), "width": np.random.RandomState(0)}

        def forward(self, x):
            return self.inner(x) * self.generators["depth"].random() * self.generators["width"].rand()

    model = Skipping()
    return model, cross_entropy(model), rows()


# rows that see each other

over_rows(
    "coupled-rows",
    "in-batch negatives",
    lambda m, b: F.cross_entropy(logits(m, b) @ logits(m, b).T, torch.arange(len(b["x"]))),
)
over_rows(
    "coupled-rows",
    "a softmax over the batch",
    lambda m, b: ((b["x"] @ b["x"].T).softmax(-1) @ logits(m, b)).square().mean(),
)
over_rows("coupled-rows", "rows less their mean", lambda m, b: losses(m, {**b, "x": b["x"] - b["x"].mean(0)}).mean())
over_rows(
    "coupled-rows",
    "rows less their mean, four rows",
    lambda m, b: losses(m, {**b, "x": b["x"] - b["x"].mean(0)}).mean(),
    batch=lambda: rows(count=4),
)
over_rows(
    "coupled-rows",
    "two towers",
    lambda m, b: F.cross_entropy(m[0](b["x"]) @ m[1](b["z"]).T, torch.arange(len(b["x"]))),
    lambda: nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]),
    lambda: {"x": rows()["x"], "z": rows(count=ROWS + 3)["x"][3:]},
)
over_rows(
    "coupled-rows",
    "sorting",
    lambda m, b: (logits(m, b)[:, 0].sort().values - b["x"][:, 0].sort().values).square().mean(),
)
over_rows("coupled-rows", "the hardest row", lambda m, b: losses(m, b).max())
over_rows("coupled-rows", "the root of a mean", lambda m, b: losses(m, b).mean().sqrt())
over_rows("coupled-rows", "pairs as a sum", lambda m, b: torch.pdist(logits(m, b)).sum())
over_rows(
    "coupled-rows",
    "load balancing",
    lambda m, b: (
        3 * (logits(m, b).softmax(-1).mean(0) * F.one_hot(logits(m, b).argmax(-1), 3).to(b["x"]).mean(0)).sum()
    ),
)
over_rows(
    "coupled-rows",
    "a token mean and load balancing",
    lambda m, b: (
        token_mean(m(b["ids"]), b["labels"]).value
        + (m(b["ids"]).softmax(-1).mean((0, 1)) * F.one_hot(m(b["ids"]).argmax(-1), 11).double().mean((0, 1))).sum()
    ),
    Tokens,
    tokens,
)
over_rows(
    "coupled-rows",
    "in-batch negatives as a ratio",
    lambda m, b: Mean(
        F.cross_entropy(logits(m, b) @ logits(m, b).T, torch.arange(len(b["x"])), reduction="sum"), len(b["x"])
    ),
)
over_rows(
    "coupled-rows",
    "one coupled term of several",
    lambda m, b: {"nll": losses(m, b).mean(), "spread": logits(m, b).var(0).mean()},
)

# what the loss does not look at is not why


@case("coupled-rows", "differences between neighbours beside an unused tensor")
def neighbours():
    model = mlp()
    return model, lambda b: model(b["x"][1:] - b["x"][:-1]).square().mean(), {**rows(), "unused": torch.randn(ROWS, 2)}


# the wrong axis


@case("wrong-axis", "time before rows")
def time_major():
    model = nn.LSTM(4, 5)
    return model, lambda x: model(x)[0].square().mean(), torch.randn(LENGTH + 3, ROWS, 4)


@case("wrong-axis", "time before rows in both, as many of both")
def time_major_square():
    model = nn.GRU(4, 5)
    batch = {"x": torch.randn(8, 8, 4), "y": torch.randn(8, 8, 5)}
    return model, lambda b: F.mse_loss(model(b["x"])[0], b["y"]), batch


@case("wrong-axis", "a transposed batch")
def transposed():
    model = mlp()
    return model, lambda x: model(x.T).square().mean(), rows()["x"].T.contiguous()


@case("wrong-axis", "a transposed input beside rows")
def transposed_square():
    model = mlp()
    batch = {"x": rows(count=4)["x"].T.contiguous(), "y": rows(count=4)["y"]}
    return model, lambda b: F.cross_entropy(model(b["x"].T), b["y"]), batch


@case("wrong-axis", "class weights as long as the batch")
def class_weights():
    model = nn.Linear(4, ROWS)
    batch = {"x": rows()["x"], "y": torch.randint(ROWS, (ROWS,)), "weight": torch.rand(ROWS)}
    return (
        model,
        lambda b: Mean.of(F.cross_entropy(model(b["x"]), b["y"], reduction="none") * b["weight"][b["y"]]),
        batch,
    )


@case("wrong-axis", "class weights as long as the batch, beside integers")
def class_weights_beside_integers():
    model = nn.Sequential(nn.EmbeddingBag(11, 6), nn.Linear(6, ROWS))
    batch = {"ids": tokens()["ids"], "y": torch.randint(ROWS, (ROWS,)), "weight": torch.rand(ROWS)}
    return (
        model,
        lambda b: (F.cross_entropy(model(b["ids"]), b["y"], reduction="none") * b["weight"][b["y"]]).mean(),
        batch,
    )


@case("wrong-axis", "a scale of features as long as the batch")
def feature_scale():
    model = nn.Linear(5, 5)
    batch = {"x": torch.randn(5, 5), "scale": torch.rand(5)}
    return model, lambda b: (model(b["x"]) * b["scale"]).square().mean(), batch


# state


@case("state", "a Python counter")
def counter():
    model, calls = mlp(), itertools.count(1)
    return model, lambda b: cross_entropy(model)(b) * next(calls), rows()


@case("state", "a buffer that scales the loss")
def buffer():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.inner(x) * self.calls

    model = Growing()
    return model, cross_entropy(model), rows()


@case("state", "a moving average as a target")
def moving_average():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()
            self.register_buffer("centre", torch.zeros(CLASSES))

        def forward(self, x):
            logits = self.inner(x)
            centred = logits - self.centre
            self.centre = 0.9 * self.centre + 0.1 * logits.detach().mean(0)
            return centred

    model = Centred()
    return model, lambda b: model(b["x"]).square().mean(), rows()


@case("state", "a queue of earlier batches")
def queue():
    model, earlier = mlp(), deque(maxlen=4)

    def loss_fn(b):
        out = model(b["x"])
        bank = torch.cat(list(earlier)) if earlier else torch.zeros(1, CLASSES).to(out)
        earlier.append(out.detach())
        return (out @ bank.T).square().mean() + out.square().mean()

    return model, loss_fn, rows()
