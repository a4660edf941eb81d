"""The conformance table: loss forms × structures × cuts, written once for every front end.

A case says the same loss twice: as the library is told it, and as the plain objective of the whole batch.
Arrays are used through operators and methods that NumPy, torch and JAX share; what they do not share comes
from `ops`, the front end's adapter.
"""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wholebatch import Mean, Sum

WIDTH, TOKENS, CLASSES = 3, 5, 4


def make_params() -> dict[str, np.ndarray]:
    """A small network with a tied weight, a frozen one and an unused one."""
    draw = np.random.default_rng(0).normal
    return {
        "tied": draw(size=(WIDTH, WIDTH)),
        "head": draw(size=(WIDTH, CLASSES)),
        "bias": draw(size=CLASSES),
        "frozen": draw(size=WIDTH),
        "unused": draw(size=2),
    }


TRAINED = ("tied", "head", "bias", "unused")


def make_batch(rows: int, seed: int = 1) -> dict[str, np.ndarray]:
    """Sequences with unequal masks: the first row is fully masked, where there is more than one."""
    random = np.random.default_rng(seed)
    mask = random.random((rows, TOKENS)) < 0.6
    mask[:, 0] = True
    if rows > 1:
        mask[0] = False
    return {
        "x": random.normal(size=(rows, TOKENS, WIDTH)),
        "target": np.eye(CLASSES)[random.integers(CLASSES, size=(rows, TOKENS))],
        "mask": mask.astype(np.float64),
        "weight": random.random(rows) + 0.1,
    }


def logits(params, batch, ops):
    hidden = ops.tanh(batch["x"] @ params["tied"]) @ params["tied"] + params["frozen"]
    return hidden @ params["head"] + params["bias"]


def token_losses(params, batch, ops):
    scores = logits(params, batch, ops)
    return ops.log(ops.exp(scores).sum(-1)) - (scores * batch["target"]).sum(-1)


def row_losses(params, batch, ops):
    return token_losses(params, batch, ops).mean(-1)


def masked_sum(params, batch, ops):
    return (token_losses(params, batch, ops) * batch["mask"]).sum()


def z_losses(params, batch, ops):
    return (logits(params, batch, ops) ** 2).sum(-1)


@dataclass(frozen=True)
class LossCase:
    """`split` is given to the library with pieces; `whole` is the objective of the unsplit batch."""

    split: Callable[..., Any]
    whole: Callable[..., Any]
    counts: Callable[..., Any] | None = None
    terms: tuple[str, ...] = ()
    metrics: dict[str, Callable[..., Any]] = field(default_factory=dict)


def _two_means(p, b, ops):
    return {"nll": Mean(masked_sum(p, b, ops), b["mask"].sum()), "row": 0.3 * Mean.of(row_losses(p, b, ops))}


LOSSES = {
    "scalar": LossCase(
        lambda p, b, ops: row_losses(p, b, ops).mean(),
        lambda p, b, ops: row_losses(p, b, ops).mean(),
    ),
    "mean over rows": LossCase(
        lambda p, b, ops: Mean(row_losses(p, b, ops).sum(), len(b["x"])),
        lambda p, b, ops: row_losses(p, b, ops).mean(),
    ),
    "mean over masked tokens": LossCase(
        lambda p, b, ops: Mean(masked_sum(p, b, ops), b["mask"].sum()),
        lambda p, b, ops: masked_sum(p, b, ops) / b["mask"].sum(),
    ),
    "Mean.of with where": LossCase(
        lambda p, b, ops: Mean.of(token_losses(p, b, ops), where=b["mask"] > 0),
        lambda p, b, ops: masked_sum(p, b, ops) / b["mask"].sum(),
    ),
    "weighted mean": LossCase(
        lambda p, b, ops: Mean((row_losses(p, b, ops) * b["weight"]).sum(), b["weight"].sum()),
        lambda p, b, ops: (row_losses(p, b, ops) * b["weight"]).sum() / b["weight"].sum(),
    ),
    "sum": LossCase(
        lambda p, b, ops: Sum(row_losses(p, b, ops).sum()),
        lambda p, b, ops: row_losses(p, b, ops).sum(),
    ),
    "scaled mean": LossCase(
        lambda p, b, ops: 0.01 * Mean(masked_sum(p, b, ops), b["mask"].sum()),
        lambda p, b, ops: 0.01 * masked_sum(p, b, ops) / b["mask"].sum(),
    ),
    "scalar and sum": LossCase(
        lambda p, b, ops: {"row": row_losses(p, b, ops).mean(), "z": 0.1 * Sum(z_losses(p, b, ops).sum())},
        lambda p, b, ops: row_losses(p, b, ops).mean() + 0.1 * z_losses(p, b, ops).sum(),
        terms=("row", "z"),
    ),
    "one mean beside a scalar and a sum": LossCase(
        lambda p, b, ops: {
            "nll": Mean(masked_sum(p, b, ops), b["mask"].sum()),
            "row": row_losses(p, b, ops).mean(),
            "z": 0.1 * Sum(z_losses(p, b, ops).sum()),
        },
        lambda p, b, ops: (
            masked_sum(p, b, ops) / b["mask"].sum() + row_losses(p, b, ops).mean() + 0.1 * z_losses(p, b, ops).sum()
        ),
        terms=("nll", "row", "z"),
    ),
    "two means with counts of their own": LossCase(
        _two_means,
        lambda p, b, ops: masked_sum(p, b, ops) / b["mask"].sum() + 0.3 * row_losses(p, b, ops).mean(),
        counts=lambda b: {"nll": b["mask"].sum(), "row": len(b["x"])},
        terms=("nll", "row"),
    ),
    "with metrics": LossCase(
        lambda p, b, ops: (
            Mean(masked_sum(p, b, ops), b["mask"].sum()),
            {"z": Mean.of(z_losses(p, b, ops)), "row": row_losses(p, b, ops).mean(), "rows": Sum(len(b["x"]))},
        ),
        lambda p, b, ops: masked_sum(p, b, ops) / b["mask"].sum(),
        metrics={
            "z": lambda p, b, ops: z_losses(p, b, ops).mean(),
            "row": lambda p, b, ops: row_losses(p, b, ops).mean(),
            "rows": lambda p, b, ops: len(b["x"]),
        },
    ),
}

ROWS = 10
CUTS = {
    "one piece": {},
    "one row each": {"micro_batch_size": 1},
    "4+3+3": {"micro_batch_size": 4},
    "even": {"micro_batch_size": 5},
    "larger than the batch": {"micro_batch_size": 64},
    "four pieces": {"num_micro_batches": 4},
    "more pieces than rows": {"num_micro_batches": 64},
}

Row = namedtuple("Row", ["x", "target", "mask", "weight"])


@dataclass
class RowData:
    x: Any
    target: Any
    mask: Any
    weight: Any


@dataclass(frozen=True)
class FrozenRowData:
    x: Any
    target: Any
    mask: Any
    weight: Any


KEYS = ("x", "target", "mask", "weight")


@dataclass(frozen=True)
class Structure:
    pack: Callable[[dict[str, Any]], Any]
    unpack: Callable[[Any], dict[str, Any]]


def _fields(data):
    return {key: getattr(data, key) for key in KEYS}


STRUCTURES = {
    "dict": Structure(lambda b: b, lambda s: s),
    "tuple": Structure(lambda b: tuple(b[k] for k in KEYS), lambda s: dict(zip(KEYS, s, strict=True))),
    "list": Structure(lambda b: [b[k] for k in KEYS], lambda s: dict(zip(KEYS, s, strict=True))),
    "named tuple": Structure(lambda b: Row(**b), lambda s: s._asdict()),
    "ordered dict": Structure(OrderedDict, dict),
    "nested": Structure(
        lambda b: {"in": (b["x"], [b["mask"], {"w": b["weight"]}]), "out": b["target"]},
        lambda s: {"x": s["in"][0], "mask": s["in"][1][0], "weight": s["in"][1][1]["w"], "target": s["out"]},
    ),
}

DATACLASSES = {
    "dataclass": Structure(lambda b: RowData(**b), _fields),
    "frozen dataclass": Structure(lambda b: FrozenRowData(**b), _fields),
}

MAPPINGS = {"user dict": Structure(UserDict, dict)}
