"""The size of the pieces is found in every process, for its own rows, and the batch stays the global one."""

import copy

import pytest
import torch
from allocated import peak_of
from crew import on_ranks
from models import take_gradients, whole_gradients
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reference import assert_exact
from wholebatch import BudgetError, PlanError, RankError
from wholebatch.torch import Accumulator, plan


def replica(rank, model, **options):
    return DistributedDataParallel(model, process_group=rank.group, **options)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def make_data(rows=16):
    return torch.randn(rows, 32, 64, generator=torch.Generator().manual_seed(0))


def loss_of(model):
    return lambda x: (model(x) - x).square().mean()


def bytes_of(model):
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
@on_ranks(2)
def test_the_plan_of_a_ddp_module_counts_its_buckets_and_touches_nothing(rank, options):
    model, batch = make_model(), make_data()
    alone = plan(model, loss_of(model), batch, memory="1GiB", optimizer=torch.optim.AdamW)
    ddp = replica(rank, model, **options)
    before, attributes = copy.deepcopy(model.state_dict()), dict(ddp.__dict__)
    if rank.rank == 0:  # nobody else is asked
        found = plan(ddp, loss_of(ddp), batch, memory="1GiB", optimizer=torch.optim.AdamW)
        outputs_are_copied = batch[:4].nbytes if "find_unused_parameters" in options else 0
        assert 0 <= found.peak(4) - alone.peak(4) - bytes_of(model) <= outputs_are_copied
    assert ddp.__dict__ == attributes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    accumulator = Accumulator(ddp, micro_batch_size=4)
    accumulator.backward(loss_of(ddp), batch)
    found = plan(ddp, loss_of(ddp), batch, memory="1GiB")  # also where DDP would put its buckets in order now
    assert found.peak(1) < found.peak(8)
    accumulator.backward(loss_of(ddp), batch)


@on_ranks(2)
def test_the_predicted_peak_is_the_measured_one(rank):
    model, batch = make_model(), make_data(8)
    ddp = replica(rank, model)
    found = plan(ddp, loss_of(ddp), batch, memory="1GiB", optimizer=torch.optim.AdamW)

    def program():
        model, batch = make_model(), make_data(8)
        ddp = replica(rank, model)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            Accumulator(ddp, micro_batch_size=4).step(loss_of(ddp), batch, optimizer, max_norm=1.0)

    measured = peak_of(program)
    # where a thread of gloo still holds the buckets that the second batch replaces, there are two sets of them
    assert found.peak(4) == pytest.approx(measured, rel=0.01) or measured == pytest.approx(
        found.peak(4) + bytes_of(model), rel=0.01
    )


@on_ranks(2)
def test_each_process_finds_a_size_for_its_own_rows_and_the_gradient_is_that_of_all(rank):
    model, batch = make_model().double(), make_data().double()
    whole = whole_gradients(model, lambda: loss_of(model)(batch))
    ddp = replica(rank, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    mine = [batch[:12], batch[12:]][rank.rank]
    budget = plan(ddp, loss_of(ddp), batch, memory="1GiB").peak(3)
    accumulator = Accumulator(ddp, memory=budget)
    sizes = []

    def noting(x):
        sizes.append(len(x))
        return loss_of(ddp)(x)

    for share in (mine[:0] if rank.rank else batch, mine):  # one that has no rows finds its size later
        sizes.clear()
        result = accumulator.backward(noting, share)
        assert result.rows == 16
        assert sum(sizes[-result.num_micro_batches :]) == len(share)
        assert all(size <= 4 for size in sizes[len(sizes) - result.num_micro_batches :])
        assert_exact(take_gradients(model), whole)
    assert accumulator.step(noting, mine, optimizer).stepped


@on_ranks(2)
def test_a_budget_that_is_too_small_for_one_process_stops_all(rank):
    model, batch = make_model(), make_data(4)
    ddp = replica(rank, model)
    accumulator = Accumulator(ddp, memory="100KiB" if rank.rank else "1GiB")
    with pytest.raises(RankError, match="rank 1 failed .*BudgetError: memory=100.0 KiB is too little") as caught:
        accumulator.backward(loss_of(ddp), batch)
    assert isinstance(caught.value.__cause__, BudgetError if rank.rank else type(None))
    assert take_gradients(model) == {}


@on_ranks(2)
def test_what_asks_other_processes_in_its_forward_cannot_be_planned(rank):
    model = nn.Sequential(nn.SyncBatchNorm(4), nn.Linear(4, 4))
    with pytest.raises(PlanError, match="SyncBatchNorm asks other processes in each forward.* plan the model with"):
        plan(model, lambda x: model(x).mean(), torch.ones(8, 4), memory="1GiB")
