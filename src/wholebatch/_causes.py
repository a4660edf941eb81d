"""Why a split is not exact: the causes that `check` can tell apart, and what to do about each."""

from typing import Literal, NamedTuple

Cause = Literal[
    "mean-of-means",
    "sum-as-mean",
    "mean-as-total",
    "batch-statistics",
    "randomness",
    "coupled-rows",
    "wrong-axis",
    "state",
    "rounding",
]


class Meaning(NamedTuple):
    """What a cause says about a loss, and the way out, each in one line."""

    says: str
    remedy: str


MEANINGS: dict[Cause, Meaning] = {
    "mean-of-means": Meaning(
        "a mean over tokens, classes or weights, which pieces hold unequally",
        "return Mean(total, count) or token_mean(...), several in a mapping",
    ),
    "sum-as-mean": Meaning(
        "a sum, also one over a fixed number, read as a mean",
        "return Sum(total), or a mean over the rows or items of the piece",
    ),
    "mean-as-total": Meaning(
        "a mean, or what does not grow with the rows, is given as a total",
        "give the sum, Mean(losses.sum(), count), or return the mean as a scalar",
    ),
    "batch-statistics": Meaning(
        "rows are normalised by statistics of the batch, which pieces lack",
        'eval mode, GroupNorm or LayerNorm; or accept it with batch_norm="micro"',
    ),
    "randomness": Meaning(
        "two equal runs differ: each draws its own numbers",
        "nothing to mend for training; to compare, switch it off (eval mode)",
    ),
    "coupled-rows": Meaning(
        "the loss of a row changes when another row changes",
        "no cut is exact: take larger pieces, or a loss in which rows stand alone",
    ),
    "wrong-axis": Meaning(
        "what is cut along its leading axis is not one entry per row",
        "put rows on the leading axis; keep out of the batch what has none",
    ),
    "state": Meaning(
        "a second call differs from the first one, and not by randomness",
        "let calls change nothing that the loss uses; update it once per batch",
    ),
    "rounding": Meaning(
        "part of the model computes in low precision",
        "nothing to mend: the split is exact within that precision",
    ),
}
