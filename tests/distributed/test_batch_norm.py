"""Running statistics under "micro": every process ends with those of the global batch, pooled over all pieces."""

import warnings

import pytest
import torch
import torch.distributed as dist
from crew import on_ranks
from models import take_gradients, whole_gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from reference import assert_exact
from wholebatch import BatchNormError, Mean, RankError
from wholebatch.torch import Accumulator, Window

ROWS = {
    2: {"equal": [5, 5], "unequal": [7, 3], "none on one": [10, 0], "none on the first": [0, 10]},
    4: {"none on some": [0, 7, 1, 2]},
}
KINDS = {
    "BatchNorm": lambda: nn.BatchNorm2d(3),
    "cumulative average": lambda: nn.BatchNorm2d(3, momentum=None),
    "InstanceNorm": lambda: nn.InstanceNorm2d(3, track_running_stats=True),
}


class SumOverProcesses(torch.autograd.Function):
    """What every process has depends on what each of them gave."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, total = group, x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return SumOverProcesses.apply(gradient, ctx.group), None


class Synchronised(nn.SyncBatchNorm):
    """torch's own runs on GPUs only; this one exchanges what it exchanges, and sees the rows of all processes."""

    def forward(self, x):
        axes, group = (0, 2, 3), self.process_group
        count = SumOverProcesses.apply(torch.tensor(x.numel() / 3), group)
        mean = (SumOverProcesses.apply(x.sum(axes, keepdim=True), group)) / count
        variance = SumOverProcesses.apply((x - mean).square().sum(axes, keepdim=True), group) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean.flatten(), self.momentum)
            self.running_var.lerp_(variance.flatten() * (count / (count - 1)), self.momentum)
            self.num_batches_tracked += 1
        affine = self.weight[:, None, None], self.bias[:, None, None]
        return (x - mean) / (variance + self.eps).sqrt() * affine[0] + affine[1]


class Layers(nn.Module):
    """A norm that sees the rows as they are, one after it, and one that is called for some inputs only, twice."""

    def __init__(self, make=KINDS["BatchNorm"]):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.sometimes = make(), make(), make()
        self.convolution = nn.Conv2d(3, 3, 2)
        self.double()

    def forward(self, x):
        x = self.second(self.convolution(self.first(x)).tanh())
        return self.sometimes(self.sometimes(x).tanh()) if x.shape[0] == 1 else x


def images(rows, batch=0):
    """Rows that drift, so that processes and pieces have means of their own."""
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(rows, 3, 4, 4, generator=generator, dtype=torch.float64)
    return x * 3 + 100 + torch.arange(rows)[:, None, None, None]


def shares(data, rows):
    return data.split(rows)


def mean_square(model):
    return lambda x: model(x).square().mean()


def buffers(model):
    return {name: buffer.double().numpy().copy() for name, buffer in model.named_buffers()}


def accumulate_loss(model, loss_fn, batch, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Accumulator(model, batch_norm="micro", **options).backward(loss_fn, batch)


def accumulate(model, module, batch, **options):
    return accumulate_loss(model, mean_square(module), batch, **options)


def one_process(module, x, rows, size):
    """All pieces of all processes, in one."""
    pieces = [piece for share in shares(x, rows) if len(share) for piece in share.tensor_split(-(-len(share) // size))]
    accumulate(module, module, Window(pieces))


def follows(rank, kind, rows, sync="once", **options):
    module, twin, whole = (Layers(KINDS[kind]) for _ in range(3))
    ddp = DistributedDataParallel(module, process_group=rank.group, **options)
    for batch in range(3):
        x = images(sum(rows), batch)
        one_process(twin, x, rows, size=2)
        whole(x)
        accumulate(ddp, ddp, shares(x, rows)[rank.rank], micro_batch_size=2, sync=sync)
        assert_exact(buffers(module), buffers(twin))
        assert_exact(buffers(module.first), buffers(whole.first))
    assert module.first.momentum == twin.first.momentum
    return module, twin


@pytest.mark.parametrize("sync", ["once", "overlap"])
@pytest.mark.parametrize("rows", ROWS[2].values(), ids=ROWS[2])
@on_ranks(2)
def test_running_statistics_are_those_of_all_rows_in_every_process(rank, rows, sync):
    follows(rank, "BatchNorm", rows, sync)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_of_every_kind_in_four_processes(rank, kind):
    module, _ = follows(rank, kind, ROWS[4]["none on some"], find_unused_parameters=True)
    assert kind == "InstanceNorm" or module.sometimes.num_batches_tracked == 6, "it was called on one rank alone"


@on_ranks(2)
def test_where_ddp_does_not_send_buffers_they_are_the_same_all_the_same(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch call it forward_sync_buffers
        follows(rank, "BatchNorm", [7, 3], broadcast_buffers=False)


@on_ranks(2)
def test_the_rows_of_one_process_fail_the_same_comparison(rank):
    rows, x, twin, alone = [7, 3], images(10), Layers(), Layers()
    one_process(twin, x, rows, size=2)
    mine = shares(x, rows)[rank.rank]
    accumulate(alone, alone, mine, micro_batch_size=2)
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(buffers(alone), buffers(twin), tolerance=1e-3)
    ddp = DistributedDataParallel(Layers(), process_group=rank.group)
    for piece in mine.split(4)[:1]:
        ddp(piece)
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact(buffers(ddp.module), buffers(twin), tolerance=1e-3)


@on_ranks(2)
def test_a_batch_that_fails_or_is_skipped_leaves_buffers_as_they_were(rank):
    module, x = Layers(), images(5)
    ddp = DistributedDataParallel(module, process_group=rank.group)
    before, calls = buffers(module), 0

    def failing(piece):
        nonlocal calls
        calls += 1
        if calls == 2 and rank.rank:
            raise ValueError("boom")
        return mean_square(ddp)(piece)

    def infinite(piece):
        return mean_square(ddp)(piece) * (float("inf") if rank.rank else 1)

    accumulator = Accumulator(ddp, micro_batch_size=2, batch_norm="micro", on_nonfinite="skip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RankError, match="rank 1 failed in a batch that it shares: ValueError: boom"):
            accumulator.backward(failing, x)
        assert_exact(buffers(module), before, tolerance=0)
        accumulator.step(infinite, x, torch.optim.SGD(module.parameters(), 0.1))
    assert accumulator.skipped == 1
    assert_exact(buffers(module), before, tolerance=0)
    assert module.first.momentum == 0.1


def synchronised(rank, module):
    ddp = DistributedDataParallel(module, process_group=rank.group)
    for norm in (module.first, module.second):
        norm.__class__, norm.process_group = Synchronised, rank.group  # DDP would look for a GPU
    return ddp


@on_ranks(2)
def test_layers_that_pool_by_themselves_count_each_row_once(rank):
    rows = [8, 2]  # four pieces here, and one there, that runs again for nothing
    module, whole = Layers(), Layers()
    ddp = synchronised(rank, module)
    for batch in range(3):
        x = images(sum(rows), batch)
        whole(x)
        accumulate(ddp, ddp, shares(x, rows)[rank.rank], micro_batch_size=2)
        assert_exact(buffers(module.first), buffers(whole.first))


@on_ranks(2)
def test_layers_that_pool_by_themselves_are_exact_in_one_piece_of_each_process(rank):
    rows, module, whole = [8, 2], Layers(), Layers()
    ddp = synchronised(rank, module)
    module.sometimes.eval()
    accumulator = Accumulator(ddp)
    for batch in range(3):
        x = images(sum(rows), batch)
        expected = whole_gradients(whole, lambda x=x: mean_square(whole)(x))
        accumulator.backward(mean_square(ddp), shares(x, rows)[rank.rank])
        assert_exact(take_gradients(module), expected)
        assert_exact(buffers(module), buffers(whole))
    with pytest.raises(
        RankError, match="module.first \\(Synchronised\\), module.second \\(Synchronised\\): in training mode"
    ):
        Accumulator(ddp, num_micro_batches=2).backward(mean_square(ddp), x)
    module.second.process_group = dist.group.WORLD  # others than the batch's, which is of two
    with pytest.raises(RankError, match="BatchNormError: module.second \\(Synchronised\\): in training mode"):
        accumulator.backward(mean_square(ddp), x)


@on_ranks(2)
def test_layers_that_exchange_something_want_one_backward_for_each_piece(rank):
    ddp = synchronised(rank, Layers())
    two = lambda x: {"a": Mean(ddp(x).square().sum(), len(x)), "b": ddp(x).mean()}  # noqa: E731
    with pytest.raises(RankError, match="give counts= to .backward or .step"):
        accumulate_loss(ddp, two, images(4), num_micro_batches=2)


@pytest.mark.parametrize("rows", [[10, 0], [0, 10]], ids=str)
@on_ranks(2)
def test_the_only_piece_of_all_processes_is_the_whole_batch(rank, rows):
    module, whole = Layers(), Layers()
    ddp = DistributedDataParallel(module, process_group=rank.group)
    for batch in range(2):
        x = images(sum(rows), batch)
        expected = whole_gradients(whole, lambda x=x: mean_square(whole)(x))
        Accumulator(ddp).backward(mean_square(ddp), shares(x, rows)[rank.rank])
        assert_exact(take_gradients(module), expected)
        assert_exact(buffers(module), buffers(whole))


@pytest.mark.parametrize("sync", ["once", "every"])
@on_ranks(2)
def test_shards_count_each_row_once_too(rank, sync):
    rows, module, twin = [8, 2], Layers(), Layers()
    fully_shard(module, mesh=DeviceMesh.from_group(rank.group, "cpu"))
    for batch in range(2):
        x = images(sum(rows), batch)
        one_process(twin, x, rows, size=2)
        accumulate(module, module, shares(x, rows)[rank.rank], micro_batch_size=2, sync=sync)
        assert_exact(buffers(module), buffers(twin))


@on_ranks(2)
def test_modules_in_training_mode_in_one_process_only_are_an_error_in_both(rank):
    ddp = DistributedDataParallel(Layers(), process_group=rank.group)
    if rank.rank:
        ddp.module.second.eval()
    before = buffers(ddp.module)
    with pytest.raises(BatchNormError, match="statistics of \\[2, 3\\] modules are kept in different processes"):
        accumulate(ddp, ddp, images(4), micro_batch_size=2)
    assert_exact(buffers(ddp.module), before, tolerance=0)
