"""The conformance table through DDP: the rows of the batch lie in two processes, and nobody can tell."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from crew import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conformance.cases import CUTS, LOSSES, ROWS, STRUCTURES, TRAINED, make_batch, make_params
from conformance.torch_adapter import gradients, to_torch, whole, windowed
from reference import assert_exact
from wholebatch import RankError
from wholebatch.torch import Accumulator

PARAMS = make_params()
SPLITS = [[4, 6], [0, 10], [9, 1]]


class Leaves(nn.Module):
    """The table's parameters as a module, which calls whatever it is given with them."""

    def __init__(self):
        super().__init__()
        for name, array in PARAMS.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(array), requires_grad=name in TRAINED))

    def forward(self, function):
        return function(dict(self.named_parameters()))


def share(rank, batch, rows):
    start = sum(rows[: rank.rank])
    return {name: array[start : start + rows[rank.rank]] for name, array in batch.items()}


def split(rank, case, batch, rows, cut, structure, sync):
    """The library's gradient, on each process from its own rows."""
    leaves = Leaves()
    ddp = DistributedDataParallel(leaves, process_group=rank.group)
    result = Accumulator(ddp, sync=sync, **cut).backward(
        lambda piece: ddp(lambda params: case.split(params, structure.unpack(piece), torch)),
        structure.pack(to_torch(share(rank, batch, rows))),
        counts=case.counts and (lambda piece: case.counts(structure.unpack(piece))),
    )
    return result, gradients(dict(leaves.named_parameters()))


def assert_conforms(rank, case, rows, cut, structure, sync="once"):
    batch = make_batch(sum(rows))
    result, actual = split(rank, case, batch, rows, cut, structure, sync)
    loss, expected = whole(case.whole, PARAMS, batch)
    assert_exact(actual, expected)
    assert result.loss.item() == pytest.approx(loss, rel=1e-12)
    assert result.rows == sum(rows)
    if case.terms:
        assert tuple(result.terms) == case.terms
        assert sum(term.item() for term in result.terms.values()) == pytest.approx(loss, rel=1e-12)
    plain = {name: torch.tensor(array) for name, array in PARAMS.items()}
    for name, metric in case.metrics.items():
        assert result.metrics[name].item() == pytest.approx(float(metric(plain, to_torch(batch), torch)), rel=1e-12)
    assert result.metrics.keys() == case.metrics.keys()


@pytest.mark.parametrize("name", LOSSES)
@on_ranks(2)
def test_every_loss_form_in_every_structure_under_every_cut(rank, name):
    for rows in SPLITS:
        for cut in CUTS.values():
            assert_conforms(rank, LOSSES[name], rows, cut, STRUCTURES["dict"])
    for structure in STRUCTURES.values():
        assert_conforms(rank, LOSSES[name], [4, 6], {"micro_batch_size": 4}, structure)


@pytest.mark.parametrize("name", LOSSES)
@on_ranks(2)
def test_every_loss_form_that_is_divided_last(rank, name):
    case = LOSSES[name]
    if name == "one mean beside a scalar and a sum":
        with pytest.raises(RankError, match="give counts= to .backward or .step"):
            assert_conforms(rank, case, [4, 6], {}, STRUCTURES["dict"], "overlap")
        case = replace(case, counts=lambda piece: {"nll": piece["mask"].sum()})
    for rows in SPLITS:
        for cut in CUTS.values():
            assert_conforms(rank, case, rows, cut, STRUCTURES["dict"], "overlap")


@pytest.mark.parametrize("name", LOSSES)
@on_ranks(4)
def test_every_loss_form_in_four_processes(rank, name):
    for rows in ([1, 4, 0, 5], [3, 3, 3, 1]):
        assert_conforms(rank, LOSSES[name], rows, {"micro_batch_size": 2}, STRUCTURES["nested"])


@pytest.mark.parametrize("name", LOSSES)
@on_ranks(2)
def test_every_loss_form_in_a_window(rank, name):
    mine = [[1, 3], [2, 0, 4]][rank.rank]
    assert_conforms(rank, LOSSES[name], [4, 6], {}, windowed(mine))


@on_ranks(2)
def test_ddp_by_itself_fails_the_same_comparison(rank):
    """The mean of the ranks' means, in one piece each: right where they are equal, and only there."""
    batch = make_batch(ROWS)
    batch["mask"][:2] = np.eye(batch["mask"].shape[1])[0]
    for name, rows, right in (
        ("scalar", [5, 5], True),
        ("scalar", [4, 6], False),
        ("mean over masked tokens", [5, 5], False),
    ):
        case, mine, leaves = LOSSES[name], to_torch(share(rank, batch, rows)), Leaves()
        ddp = DistributedDataParallel(leaves, process_group=rank.group, find_unused_parameters=True)
        ddp(partial(case.whole, b=mine, ops=torch)).backward()
        _, expected = whole(case.whole, PARAMS, batch)
        with nullcontext() if right else pytest.raises(AssertionError, match="is off by"):
            assert_exact(gradients(dict(leaves.named_parameters())), expected)
