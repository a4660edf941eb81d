"""Rows are regrouped by length and their padding is trimmed; the gradient does not notice."""

import dataclasses
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from models import take_gradients, whole_gradients
from torch import nn
from torch.nn import functional

from reference import assert_exact
from wholebatch import BatchError, Mean, OptionError, OptionTypeError, Sum
from wholebatch.torch import Accumulator, Window, backward, check, token_mean

WIDTH, WORDS, PAD = 9, 13, 0
LENGTHS = [3, 9, 1, 5, 5, 2, 7, 0, 4, 1]


class Tagger(nn.Module):
    """Every token sees those before it, and none after."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 6)
        self.positions = nn.Embedding(WIDTH, 6)
        self.mix = nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, WORDS)
        self.double()
        self.seen = []

    def forward(self, ids, positions=None):
        self.seen.append(tuple(ids.shape))
        positions = torch.arange(ids.shape[1]) if positions is None else positions
        return self.head(self.mix(self.words(ids) + self.positions(positions))[0])


def make_batch(lengths=LENGTHS, width=WIDTH, left=False):
    draw = torch.Generator().manual_seed(1)
    lengths = torch.tensor(lengths)
    columns = torch.arange(width)
    kept = columns >= width - lengths[:, None] if left else columns < lengths[:, None]
    ids = torch.randint(1, WORDS, (len(lengths), width), generator=draw)
    weight = torch.rand(len(lengths), generator=draw, dtype=torch.float64)
    return {
        "input_ids": ids.masked_fill(~kept, PAD),
        "attention_mask": kept.long(),
        "labels": ids.masked_fill(~kept, -100),
        "position_ids": columns.expand(len(lengths), -1),
        "weight": weight,
        "vectors": torch.randn(len(lengths), width, 2, generator=draw, dtype=torch.float64) * kept[..., None],
    }


def by_mask(batch):
    return batch["attention_mask"].sum(1)


def token_loss(model):
    def loss_fn(b):
        return token_mean(model(b["input_ids"], b["position_ids"]), b["labels"], shift=False)

    return loss_fn


def row_loss(model):
    """A scalar, the mean over rows, of a weighted sum over the tokens of each."""

    def loss_fn(b):
        nll = functional.cross_entropy(model(b["input_ids"]).transpose(1, 2), b["input_ids"], reduction="none")
        return ((nll * b["attention_mask"]).sum(1) * b["weight"] * (1 + b["vectors"].sum((1, 2)))).mean()

    return loss_fn


def several_terms(model):
    def loss_fn(b):
        return {
            "nll": token_loss(model)(b),
            "row": row_loss(model)(b),
            "size": 0.1 * Sum(model.head.bias.sum() * len(b["weight"])),
        }

    return loss_fn


LOSSES = {"a mean over tokens": token_loss, "a mean over rows": row_loss, "several terms": several_terms}
CUTS = {
    "a budget": {"micro_batch_tokens": 18},
    "a budget of the longest row": {"micro_batch_tokens": 9},
    "a budget for all": {"micro_batch_tokens": 1000},
    "a size": {"micro_batch_size": 3},
    "a number": {"num_micro_batches": 4},
    "one piece": {},
}
RAGGED = {
    "ragged": LENGTHS,
    "all alike": [WIDTH] * 5,
    "one row": [4],
    "a row of no token": [0, 2],
    "sorted already": [9, 8, 3, 1],
}


def value(loss):
    terms = loss.values() if isinstance(loss, dict) else [loss]
    return sum(term if isinstance(term, torch.Tensor) else term.value for term in terms)


@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_gradient_is_that_of_the_padded_batch(loss, cut, lengths):
    model, batch = Tagger(), make_batch(lengths)
    if loss is row_loss:
        del batch["labels"]  # a scalar beside them would be refused
    loss_fn = loss(model)
    whole = whole_gradients(model, lambda: value(loss_fn(batch)))
    expected = value(loss_fn(batch)).item()
    result = Accumulator(model, lengths=by_mask, **cut).backward(loss_fn, batch, counts=counts_of(loss))
    assert_exact(take_gradients(model), whole)
    assert result.loss.item() == pytest.approx(expected, rel=1e-12)
    assert result.rows == len(lengths)


def counts_of(loss):
    if loss is not several_terms:
        return None
    return lambda b: {"nll": (b["labels"] != -100).sum()}


def test_a_mean_of_the_pieces_means_fails_the_same_comparison():
    model, batch = Tagger(), make_batch([max(1, n) for n in LENGTHS])
    whole = whole_gradients(model, lambda: token_loss(model)(batch).value)
    batch["targets"] = batch.pop("labels")  # beside labels, a scalar would be refused

    def naive(b):
        return token_loss(model)({**b, "labels": b["targets"]}).value

    backward(model, naive, batch, lengths=by_mask, micro_batch_tokens=18, on_nonfinite="keep")
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(take_gradients(model), whole)


def test_trimming_what_is_counted_fails_the_same_comparison():
    model, batch = Tagger(), make_batch()
    whole = whole_gradients(model, lambda: token_loss(model)(batch).value)
    cut_short = lambda piece, longest: trimmed(piece, max(1, longest - 1))  # noqa: E731
    backward(model, token_loss(model), batch, lengths=by_mask, trim=cut_short, micro_batch_size=2)
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(take_gradients(model), whole)


def trimmed(piece, longest):
    return {key: part[:, :longest] if part.dim() > 1 else part for key, part in piece.items()}


def test_pieces_are_as_wide_as_their_longest_row_and_within_the_budget():
    model, batch = Tagger(), make_batch()
    result = backward(model, token_loss(model), batch, lengths=by_mask, micro_batch_tokens=18)
    assert model.seen[0][1] == 9
    assert sum(rows * width for rows, width in model.seen) < 10 * WIDTH / 2
    assert all(rows * width <= 18 for rows, width in model.seen)
    assert sum(rows for rows, _ in model.seen) == result.rows == 10
    assert result.num_micro_batches == len(model.seen)


def test_given_sizes_are_sorted_and_trimmed_all_the_same():
    model = Tagger()
    backward(model, token_loss(model), make_batch(), lengths=by_mask, micro_batch_size=5)
    assert model.seen == [(5, 9), (5, 3)]


def test_rows_stay_together():
    batch, seen = {**make_batch(), "row": torch.arange(10)}, []
    del batch["labels"]
    weight = nn.Parameter(torch.ones(()))

    def loss_fn(b):
        for i, row in enumerate(b["row"]):
            length = LENGTHS[row]
            assert torch.equal(b["input_ids"][i][:length], batch["input_ids"][row][:length])
            assert b["weight"][i] == batch["weight"][row]
            assert torch.equal(b["vectors"][i][:length], batch["vectors"][row][:length])
        seen.extend(b["row"].tolist())
        return weight * 1

    backward([weight], loss_fn, batch, lengths=by_mask, micro_batch_tokens=9)
    assert sorted(seen) == list(range(10))


def test_one_piece_is_a_view_and_an_untrimmed_batch_is_itself():
    batch = make_batch([WIDTH] * 3)
    weight = nn.Parameter(torch.ones(()))

    def loss_fn(b):
        assert b["input_ids"].data_ptr() == batch["input_ids"].data_ptr()
        return weight * 1

    backward([weight], loss_fn, batch, lengths=by_mask)


Pair = namedtuple("Pair", ["ids", "mask"])


@dataclasses.dataclass
class Record:
    ids: torch.Tensor
    mask: torch.Tensor


STRUCTURES = {
    "tuple": (lambda i, m: (i, m), lambda b: b[1].sum(1), lambda b: b),
    "list": (lambda i, m: [i, m], lambda b: b[1].sum(1), lambda b: b),
    "named tuple": (Pair, lambda b: b.mask.sum(1), lambda b: b),
    "dataclass": (Record, lambda b: b.mask.sum(1), lambda b: (b.ids, b.mask)),
    "mapping": (lambda i, m: UserDict(i=i, m=m), lambda b: b["m"].sum(1), lambda b: (b["i"], b["m"])),
    "nested": (
        lambda i, m: {"x": (i, {"m": m}), "name": "z"},
        lambda b: b["x"][1]["m"].sum(1),
        lambda b: (b["x"][0], b["x"][1]["m"]),
    ),
    "tensor": (lambda i, m: i, lambda b: (b != PAD).sum(1), lambda b: (b, b != PAD)),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_batches_of_all_structures(name):
    pack, lengths, unpack = STRUCTURES[name]
    model, rows = Tagger(), make_batch()
    batch = pack(rows["input_ids"], rows["attention_mask"])

    def loss_fn(b):
        assert type(b) is type(batch)
        ids, mask = unpack(b)
        nll = functional.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none")
        return Mean((nll * mask).sum(), mask.sum())

    whole = whole_gradients(model, lambda: loss_fn(batch).value)
    backward(model, loss_fn, batch, lengths=lengths, micro_batch_tokens=18)
    assert len(model.seen) > 2
    assert_exact(take_gradients(model), whole)


@pytest.mark.parametrize(
    "given",
    [LENGTHS, np.array(LENGTHS), torch.tensor(LENGTHS, dtype=torch.float32), tuple(LENGTHS)],
    ids=["list", "array", "tensor", "tuple"],
)
def test_lengths_may_be_a_list_an_array_or_a_tensor(given):
    model, batch = Tagger(), make_batch()
    whole = whole_gradients(model, lambda: token_loss(model)(batch).value)
    backward(model, token_loss(model), batch, lengths=lambda b: given, micro_batch_tokens=18)
    assert_exact(take_gradients(model), whole)


def test_padding_elsewhere_is_trimmed_by_hand():
    model, batch = Tagger(), make_batch()
    turned = {key: batch[key].t() for key in ("input_ids", "labels")}
    whole = whole_gradients(model, lambda: token_loss(model)(batch).value)
    by_row = {key: part.t() for key, part in turned.items()} | {"square": torch.ones(10, 1, WIDTH, WIDTH)}

    def trim(piece, longest):
        return {
            "input_ids": piece["input_ids"][:, :longest],
            "labels": piece["labels"][:, :longest],
            "square": piece["square"][..., :longest, :longest],
        }

    def loss_fn(b):
        width = b["input_ids"].shape[1]
        assert b["square"].shape[1:] == (1, width, width)
        return token_mean(model(b["input_ids"]), b["labels"], shift=False)

    lengths = lambda b: (b["labels"] != -100).sum(1)  # noqa: E731
    backward(model, loss_fn, by_row, lengths=lengths, trim=trim, micro_batch_tokens=18)
    assert_exact(take_gradients(model), whole)


def test_gradients_are_as_they_were_if_a_piece_fails():
    model, batch = Tagger(), make_batch()
    model.head.bias.grad = before = torch.ones_like(model.head.bias)

    def failing(b):
        if len(model.seen) == 2:
            raise RuntimeError("third")
        return token_loss(model)(b)

    with pytest.raises(RuntimeError, match="third"):
        backward(model, failing, batch, lengths=by_mask, micro_batch_tokens=9)
    assert model.head.bias.grad is before
    assert before.eq(1).all()
    assert model.head.weight.grad is None


LEFT = make_batch(left=True)


@pytest.mark.parametrize(
    ("keys", "lengths", "batch"),
    [
        (["input_ids"], LENGTHS, LEFT),
        (["attention_mask"], LENGTHS, LEFT),
        (["labels"], LENGTHS, LEFT),
        (["vectors"], LENGTHS, LEFT),
        (["attention_mask"], [WIDTH, WIDTH - 1], make_batch([WIDTH, WIDTH - 1], left=True)),
        (["labels"], [WIDTH, WIDTH - 1], make_batch([WIDTH, WIDTH - 1], left=True)),
        (["attention_mask"], [3], make_batch([3], left=True)),
        (["input_ids"], [3], make_batch([3], left=True)),
        (["input_ids"], [n // 2 for n in LENGTHS], make_batch()),
    ],
)
def test_what_is_not_right_padding_is_refused_and_not_cut(keys, lengths, batch):
    model = Tagger()
    given = {key: batch[key] for key in keys}
    with pytest.raises(BatchError, match=rf'batch\["{keys[0]}"\] holds more than padding beyond length'):
        backward(model, lambda b: model.head.bias.sum(), given, lengths=lambda b: lengths, micro_batch_tokens=100)
    assert model.head.bias.grad is None


def test_the_row_and_its_length_are_named():
    batch = make_batch([4, 5, 9])
    batch["input_ids"][1, 7] = 3
    with pytest.raises(BatchError) as caught:
        backward(Tagger(), lambda b: None, batch, lengths=by_mask)
    assert str(caught.value) == (
        'batch["input_ids"] holds more than padding beyond length 5 of row 1: only right padding can be trimmed, which '
        "is the same value everywhere. Pad on the right, correct lengths=, or give trim=, a function of a piece and its "
        "longest length"
    )


OPTIONS = {
    "tokens without lengths": ({"micro_batch_tokens": 8}, OptionError, "micro_batch_tokens needs lengths=, a function"),
    "trim without lengths": ({"trim": trimmed}, OptionError, "trim needs lengths=, a function"),
    "tokens and a size": (
        {"micro_batch_tokens": 8, "micro_batch_size": 2, "lengths": by_mask},
        OptionError,
        "both micro_batch_tokens=8 and micro_batch_size=2 were given: give one of them",
    ),
    "tokens and a number": (
        {"micro_batch_tokens": 8, "num_micro_batches": 2, "lengths": by_mask},
        OptionError,
        "both micro_batch_tokens=8 and num_micro_batches=2 were given: give one of them",
    ),
    "no tokens": (
        {"micro_batch_tokens": 0, "lengths": by_mask},
        OptionError,
        "micro_batch_tokens must be at least 1, got 0",
    ),
    "half tokens": (
        {"micro_batch_tokens": 8.5, "lengths": by_mask},
        OptionTypeError,
        "micro_batch_tokens must be a positive integer, got 8.5",
    ),
    "lengths themselves": (
        {"lengths": LENGTHS},
        OptionTypeError,
        "lengths must be a function of the batch .*, got list",
    ),
    "a width": (
        {"lengths": by_mask, "trim": 1},
        OptionTypeError,
        "trim must be a function of a piece and its longest length, got int",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_cannot_be_meant_are_refused(name):
    options, error, message = OPTIONS[name]
    with pytest.raises(error, match=message):
        Accumulator(Tagger(), **options)


LENGTH_ERRORS = {
    "too few": (lambda b: [1, 2], r"one length for each of the 10 rows, got shape \(2,\)"),
    "a table": (lambda b: b["attention_mask"], r"one length for each of the 10 rows, got shape \(10, 9\)"),
    "nothing": (lambda b: None, "one length for each row, got None"),
    "halves": (lambda b: torch.tensor(LENGTHS) + 0.5, "whole numbers of at least 0, got 3.5 for row 0"),
    "negative": (lambda b: [-1, *LENGTHS[1:]], "whole numbers of at least 0, got -1 for row 0"),
    "too long": (lambda b: [*LENGTHS[:9], 12], "row 9 has length 12, but rows are 9 wide"),
}


@pytest.mark.parametrize("name", LENGTH_ERRORS)
def test_lengths_that_cannot_be_meant_are_refused(name):
    lengths, message = LENGTH_ERRORS[name]
    with pytest.raises(BatchError, match=message):
        backward(Tagger(), lambda b: None, make_batch(), lengths=lengths, micro_batch_tokens=18)


def test_a_row_over_the_budget_is_an_error_that_names_it():
    with pytest.raises(BatchError, match="row 1 has length 9, and a piece may hold micro_batch_tokens=8"):
        backward(Tagger(), lambda b: None, make_batch(), lengths=by_mask, micro_batch_tokens=8)


def test_a_window_is_refused():
    with pytest.raises(BatchError, match="a Window is cut already, and lengths= regroups the rows of a whole batch"):
        backward(Tagger(), lambda b: None, Window([make_batch()]), lengths=by_mask)


def test_a_batch_without_an_axis_to_trim_is_refused():
    with pytest.raises(BatchError, match="no tensor in the batch has an axis 1 that padding could be trimmed from"):
        backward(Tagger(), lambda b: None, torch.ones(3), lengths=lambda b: [1, 2, 3])


def test_check_compares_trimmed_pieces_with_the_padded_batch():
    model, batch = Tagger(), make_batch()
    assert check(model, token_loss(model), batch, lengths=by_mask).exact
    sees_padding = lambda b: Sum(model(b["input_ids"]).square().sum())  # noqa: E731
    report = check(model, sees_padding, batch, lengths=by_mask)
    assert not report.exact
    assert report.failure is None
    assert not check(
        model, token_loss(model), batch, lengths=by_mask, trim=lambda piece, longest: trimmed(piece, 1)
    ).exact
