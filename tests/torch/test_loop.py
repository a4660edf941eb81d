"""A loop with little in it: what the library does for each piece besides what a loop written by hand would do."""

import sys
from collections import Counter

import pytest
import torch
from models import make_data, make_loss, make_model, take_gradients, whole_gradients
from torch.utils._python_dispatch import TorchDispatchMode

from reference import assert_exact
from wholebatch import Mean
from wholebatch.torch import Accumulator

FEW, MANY = 4, 12


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def operators(run, pieces):
    with Operators() as watch:
        run(pieces)
    return watch.seen


def per_piece(count, run):
    """What each piece more adds, as whatever happens once per batch cancels."""
    few, many = count(run, FEW), count(run, MANY)
    grown = {key: (many[key] - few[key]) / (MANY - FEW) for key in many}
    return {key: number for key, number in grown.items() if number}


def by_the_library(model, form=lambda loss, rows: loss):
    loss_fn = make_loss(model)

    def run(pieces):
        data = make_data(rows=2 * pieces)
        Accumulator(model, micro_batch_size=2).backward(lambda b: form(loss_fn(b), len(b[0])), data)
        model.zero_grad()

    return run


def by_hand(model):
    loss_fn = make_loss(model)

    def run(pieces):
        x, y = make_data(rows=2 * pieces)
        for i in range(0, 2 * pieces, 2):
            (loss_fn((x[i : i + 2], y[i : i + 2])) / pieces).backward()
        model.zero_grad()

    return run


def test_a_piece_runs_the_operators_of_a_loop_by_hand_and_keeps_its_loss():
    ours, plain = (per_piece(operators, run(make_model())) for run in (by_the_library, by_hand))
    difference = {key: ours.get(key, 0) - plain.get(key, 0) for key in ours | plain}
    difference = {key: number for key, number in difference.items() if number}
    # the loss is written down; it is neither divided nor is its division differentiated
    assert difference == {"copy_": 1, "detach": 1, "div": -2, "ones_like": -1}


@pytest.mark.parametrize("form", [lambda loss, rows: loss, lambda loss, rows: Mean(loss * rows, rows)])
def test_no_piece_is_read_on_the_host(form):
    seen = operators(by_the_library(make_model(), form), MANY)
    assert seen["_local_scalar_dense"] <= 2


def calls(run, pieces):
    """Calls of Python functions of the library."""
    seen = Counter()

    def watch(frame, event, _):
        if event == "call" and "wholebatch" in frame.f_globals.get("__name__", ""):
            seen["calls"] += 1

    sys.setprofile(watch)
    try:
        run(pieces)
    finally:
        sys.setprofile(None)
    return seen


def test_a_piece_takes_few_calls():
    assert per_piece(calls, by_the_library(make_model()))["calls"] <= 28


def test_a_batch_is_walked_once_and_not_for_each_piece(monkeypatch):
    from wholebatch.torch import _tree

    walked, children = [], _tree._children

    def counting(node):
        walked.append(node)
        return children(node)

    monkeypatch.setattr(_tree, "_children", counting)
    numbers = []
    for pieces in (FEW, MANY):
        walked.clear()
        by_the_library(make_model())(pieces)
        numbers.append(len(walked))
    assert numbers[0] == numbers[1]


def test_parameters_that_are_known_end_the_walk_through_the_graph():
    from wholebatch.torch._sums import GradientSums

    model, data, sums = make_model(), make_data(), GradientSums()
    sums.begin(model.parameters())
    try:
        owned = []
        sums._own = owned.append
        for _ in range(2):
            sums.adopt([make_loss(model)(data)])
        assert len(sums._accumulating) == 4
        assert owned == []
    finally:
        sums.restore()


class Marked(torch.Tensor):
    """A loss of somebody's own type."""


def test_a_loss_of_another_type_takes_the_way_that_its_type_decides():
    model, data = make_model(), make_data()
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    Accumulator(model, micro_batch_size=3).backward(lambda b: make_loss(model)(b).as_subclass(Marked), data)
    assert_exact(take_gradients(model), whole)
