"""DDP: the gradient of the global batch, however its rows lie in the processes and however they are cut."""

import pytest
from crew import Rank, on_ranks
from models import make_data, make_loss, make_model, take_gradients, whole_gradients
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reference import assert_exact
from wholebatch.torch import Accumulator

ROWS = {
    2: {"equal": [5, 5], "unequal": [7, 3], "none on one": [0, 10], "none on the first": [10, 0], "one each": [1, 1]},
    4: {"equal": [3, 3, 3, 3], "unequal": [6, 1, 2, 4], "none on some": [0, 9, 0, 1]},
}


def replica(rank: Rank, model: nn.Module, **options) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=rank.group, **options)


def share(rank: Rank, data, rows):
    """This process's rows."""
    start = sum(rows[: rank.rank])
    return tuple(tensor[start : start + rows[rank.rank]] for tensor in data)


@pytest.mark.parametrize("rows", ROWS[2].values(), ids=ROWS[2])
@on_ranks(2)
def test_the_gradient_is_that_of_the_global_batch(rank, rows):
    _assert_exact_in_every_cut(rank, rows)


@pytest.mark.parametrize("rows", ROWS[4].values(), ids=ROWS[4])
@on_ranks(4)
def test_and_in_four_processes(rank, rows):
    _assert_exact_in_every_cut(rank, rows)


def _assert_exact_in_every_cut(rank, rows):
    data = make_data(sum(rows))
    model = make_model()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: loss_fn(data))
    expected = loss_fn(data).item()
    ddp = replica(rank, model)
    for cut in ({}, {"micro_batch_size": 1}, {"micro_batch_size": 3}, {"num_micro_batches": 1 + rank.rank}):
        result = Accumulator(ddp, **cut).backward(make_loss(ddp), share(rank, data, rows))
        assert_exact(take_gradients(model), whole)
        assert result.loss.item() == pytest.approx(expected, rel=1e-12)
        assert (result.rows, result.count) == (sum(rows), sum(rows))
