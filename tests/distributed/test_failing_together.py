"""What fails in one process fails in all of them, soon, by name, and leaves no trace."""

import copy
import os
import time

import pytest
import torch
import torch.distributed as dist
from crew import Crew, on_ranks
from models import make_data, make_loss, make_model, take_gradients, whole_gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from reference import assert_exact
from wholebatch import LossError, Mean, NonFiniteError, RankError
from wholebatch.torch import Accumulator, Window

SOON = 30


class Disturbing(nn.Module):
    """Writes a buffer and draws numbers in each forward."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.inner(nn.functional.dropout(x, 0.5))


class Traces:
    """What a failed batch must leave as it was."""

    def __init__(self, model):
        self.model = model
        for i, parameter in enumerate(model.parameters()):
            parameter.grad = torch.ones_like(parameter) if i % 2 else None
        self.gradients = [parameter.grad for parameter in model.parameters()]
        self.state = copy.deepcopy(model.state_dict())
        self.random = torch.get_rng_state()

    def assert_none(self):
        for parameter, gradient in zip(self.model.parameters(), self.gradients, strict=True):
            assert (parameter.grad is None) == (gradient is None)
            assert gradient is None or torch.equal(parameter.grad, torch.ones_like(parameter))
        for name, tensor in self.model.state_dict().items():
            assert torch.equal(tensor, self.state[name])
        assert torch.equal(torch.get_rng_state(), self.random)


def at_piece(number, loss_fn, fail):
    """Fails at that piece, and only once."""
    calls = 0

    def failing(piece):
        nonlocal calls
        calls += 1
        return fail() if calls == number else loss_fn(piece)

    return failing


def raise_(error):
    raise error


def too_much_memory():
    return torch.empty(2**60)


FAILURES = {
    "an exception": (lambda: raise_(KeyError("a bug")), KeyError, "KeyError: 'a bug'", False),
    "out of memory": (too_much_memory, RuntimeError, "can't allocate memory", True),
    "out of memory on a device": (
        lambda: raise_(torch.OutOfMemoryError("CUDA out of memory")), torch.OutOfMemoryError, "CUDA out of memory", True,
    ),
    "a loss that is not finite": (
        lambda: torch.tensor(float("nan"), requires_grad=True), NonFiniteError, "term 'loss' of piece 2 of [0-9] is nan", False,
    ),
    "a loss that cannot be read": (lambda: torch.ones(3), LossError, "must be a scalar, got shape \\(3,\\)", False),
    "a loss without a graph": (lambda: torch.ones(()), LossError, "the loss has no graph", False),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("name", FAILURES)
@on_ranks(2)
def test_every_process_raises_and_names_the_rank(rank, name, options):
    fail, cause, words, out_of_memory = FAILURES[name]
    model, data = Disturbing(), make_data()
    ddp = DistributedDataParallel(model, process_group=rank.group, **options)
    mine = tuple(tensor[5 * rank.rank :][: 5 + rank.rank] for tensor in data)
    accumulator = Accumulator(ddp, micro_batch_size=2)
    for guilty in (1, 0):
        for times in range(2):  # the second time after a batch that went well
            loss_fn = make_loss(ddp)
            traces, start = Traces(model), time.monotonic()
            with pytest.raises(RankError, match=f"rank {guilty} failed in a batch that it shares: .*{words}") as caught:
                accumulator.backward(at_piece(2, loss_fn, fail) if rank.rank == guilty else loss_fn, mine)
            assert time.monotonic() - start < SOON
            assert caught.value.rank == guilty
            assert caught.value.out_of_memory == out_of_memory
            assert isinstance(caught.value.__cause__, cause if rank.rank == guilty else type(None))
            traces.assert_none()
            model.zero_grad()
            accumulator.backward(loss_fn, mine)
            assert all(parameter.grad is not None for parameter in model.parameters()), times


BATCHES = {"0-d": torch.zeros(()), "ragged": (torch.zeros(3, 4), torch.zeros(2)), "no tensors": "words"}


@pytest.mark.parametrize("name", BATCHES)
@on_ranks(2)
def test_a_batch_that_cannot_be_cut_in_one_process(rank, name):
    ddp = DistributedDataParallel(Disturbing(), process_group=rank.group)
    traces = Traces(ddp.module)
    with pytest.raises(RankError, match="rank 0 failed .*(nothing to cut|batch rows differ)"):
        Accumulator(ddp).backward(make_loss(ddp), make_data() if rank.rank else BATCHES[name])
    traces.assert_none()


@on_ranks(2)
def test_failures_on_both_ranks_are_both_named_and_each_has_its_own_cause(rank):
    ddp = DistributedDataParallel(make_model(), process_group=rank.group)
    with pytest.raises(RankError, match="rank 0 \\(and 1 more: 1\\) failed .*: ValueError: boom 0;") as caught:
        Accumulator(ddp).backward(lambda piece: raise_(ValueError(f"boom {rank.rank}")), make_data())
    assert str(caught.value.__cause__) == f"boom {rank.rank}"


@on_ranks(2)
def test_an_interrupt_stays_an_interrupt_where_it_happened(rank):
    ddp = DistributedDataParallel(Disturbing(), process_group=rank.group)
    traces = Traces(ddp.module)
    with pytest.raises(RankError if rank.rank else KeyboardInterrupt):
        Accumulator(ddp).backward(
            make_loss(ddp) if rank.rank else lambda piece: raise_(KeyboardInterrupt()), make_data()
        )
    traces.assert_none()


@on_ranks(2)
def test_a_long_error_is_cut_short(rank):
    ddp = DistributedDataParallel(make_model(), process_group=rank.group)
    with pytest.raises(RankError) as caught:
        Accumulator(ddp).backward(
            make_loss(ddp) if rank.rank else lambda piece: raise_(ValueError("é" * 10_000)), make_data()
        )
    assert 1000 < len(str(caught.value)) < 1200


@on_ranks(2)
def test_different_losses_in_different_processes_are_refused_in_both(rank):
    ddp = DistributedDataParallel(make_model(), process_group=rank.group)
    loss_fn = make_loss(ddp)
    with pytest.raises(LossError, match="differs between processes, by what is divided by what: {'loss': 'rows'} and"):
        Accumulator(ddp).backward(lambda piece: Mean(loss_fn(piece), 1) if rank.rank else loss_fn(piece), make_data())
    assert all(parameter.grad is None for parameter in ddp.parameters())


@on_ranks(2)
def test_skip_skips_everywhere_and_keep_does_not_look(rank):
    model, data = Disturbing(), make_data()
    ddp = DistributedDataParallel(model, process_group=rank.group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = copy.deepcopy(dict(model.named_parameters()))
    loss_fn = make_loss(ddp)
    spoilt = at_piece(2, loss_fn, lambda: loss_fn(data) * float("inf")) if rank.rank else loss_fn
    accumulator = Accumulator(ddp, micro_batch_size=4, on_nonfinite="skip")
    result = accumulator.step(spoilt, data, optimizer)
    assert (result.stepped, accumulator.skipped) == (False, 1)
    assert all(torch.equal(parameter, start[name]) for name, parameter in model.named_parameters())
    assert accumulator.step(spoilt, data, optimizer).stepped, "it fails only once"
    assert not all(torch.equal(parameter, start[name]) for name, parameter in model.named_parameters())
    spoilt = at_piece(2, loss_fn, lambda: loss_fn(data) * float("inf")) if rank.rank else loss_fn
    result = Accumulator(ddp, micro_batch_size=4, on_nonfinite="keep").backward(spoilt, data)
    assert not result.loss.isfinite()


@on_ranks(2)
def test_the_norm_of_the_gradient_is_the_same_verdict_everywhere(rank):
    model, data = make_model(), make_data()
    ddp = DistributedDataParallel(model, process_group=rank.group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def infinite_slope(piece):
        y = ddp(piece[0])
        return (y - y.detach()).clamp(min=0).sqrt().sum() if rank.rank else y.sum() * 0

    with pytest.raises(NonFiniteError, match="the norm of the gradient is nan"):
        Accumulator(ddp).step(infinite_slope, data, optimizer, max_norm=1.0)


@on_ranks(2)
def test_a_scaler_decides_the_same_on_every_rank(rank):
    model, data = make_model().float(), make_data()
    data = data[0].float(), data[1]
    ddp = DistributedDataParallel(model, process_group=rank.group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    accumulator, loss_fn = Accumulator(ddp, micro_batch_size=4), make_loss(ddp)
    overflowing = at_piece(2, loss_fn, lambda: loss_fn(data) * 1e38) if rank.rank else loss_fn
    assert not accumulator.step(overflowing, data, optimizer, scaler=scaler, max_norm=1.0).stepped
    assert scaler.get_scale() == 2.0**9
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    assert accumulator.step(loss_fn, data, optimizer, scaler=scaler, max_norm=1.0).stepped
    accumulator.backward(loss_fn, data, scaler=scaler)
    scaler.unscale_(optimizer)
    assert_exact(take_gradients(model), whole_gradients(model, lambda: make_loss(model)(data)), tolerance=1e-5)
    assert whole


@on_ranks(2)
def test_a_loop_that_adds_fails_together(rank):
    model, data = make_model(), make_data()
    ddp = DistributedDataParallel(model, process_group=rank.group)
    accumulator = Accumulator(ddp)
    for _ in range(2):
        with ddp.no_sync():
            accumulator.add(make_loss(ddp)(data), rows=10)
            loss = make_loss(ddp)(data)
        with pytest.raises(RankError, match="rank 1 failed .*rows must be at least 0"):
            accumulator.add(loss, rows=-1) if rank.rank else accumulator.finish()
        assert all(parameter.grad is None for parameter in model.parameters())
    with ddp.no_sync():
        accumulator.add(make_loss(ddp)(data), rows=10)
    assert accumulator.finish().rows == 20


def dying(rank):
    """One process ends without a word, before it has come to the end of its pieces."""
    model, data = Disturbing(), make_data()
    ddp = DistributedDataParallel(model, process_group=rank.group)
    loss_fn = make_loss(ddp)
    traces, start = Traces(model), time.monotonic()
    with pytest.raises(RankError, match="the other processes of the batch did not answer: one has ended") as caught:
        Accumulator(ddp, micro_batch_size=2).backward(
            at_piece(3, loss_fn, lambda: os._exit(1)) if rank.rank else loss_fn, data
        )
    assert time.monotonic() - start < SOON
    assert caught.value.rank is None
    traces.assert_none()


@on_ranks(2)
def test_a_process_that_does_not_come_to_the_batch_ends_the_others(rank):
    rank = rank.impatient()
    ddp = DistributedDataParallel(make_model(), process_group=rank.group)
    dist.barrier(rank.group)
    if rank.rank:
        time.sleep(6)
        return
    start = time.monotonic()
    with pytest.raises(RankError, match="did not come to the same batch within the process group's time-out"):
        Accumulator(ddp).backward(make_loss(ddp), make_data())
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize("at", ["before the last piece", "in the last piece"])
@on_ranks(2)
def test_a_failure_where_the_reduction_overlaps(rank, at):
    """Before the last piece it is known at once; in the last piece the others are in the reduction already."""
    rank = rank.impatient()
    model, data = Disturbing(), make_data()
    ddp = DistributedDataParallel(model, process_group=rank.group)
    accumulator, loss_fn = Accumulator(ddp, micro_batch_size=4, sync="overlap"), make_loss(ddp)
    traces, start = Traces(model), time.monotonic()
    failing = at_piece(2 if at == "before the last piece" else 3, loss_fn, lambda: raise_(ValueError("boom")))
    with pytest.raises(RankError, match="rank 1 failed in a batch that it shares: ValueError: boom") as caught:
        accumulator.backward(failing if rank.rank else loss_fn, data)
    assert time.monotonic() - start < SOON
    assert isinstance(caught.value.__cause__, ValueError if rank.rank else (RuntimeError, type(None)))
    traces.assert_none()
    if at == "before the last piece":
        accumulator.backward(loss_fn, data)


def dying_in_the_reduction(rank):
    """All is well with the pieces, and then one process ends where gradients are sent."""
    model, data = Disturbing(), make_data()
    ddp = DistributedDataParallel(model, process_group=rank.group)
    if rank.rank:
        ddp.register_comm_hook(None, lambda state, bucket: os._exit(1))
    traces = Traces(model)
    with pytest.raises(RankError, match="the other processes of the batch did not answer: one has ended") as caught:
        Accumulator(ddp, micro_batch_size=2).backward(make_loss(ddp), data)
    assert isinstance(caught.value.__cause__, RuntimeError)
    traces.assert_none()


def dying_in_a_sharded_model(rank):
    mesh = DeviceMesh.from_group(rank.group, "cpu")
    model, data = fully_shard(make_model(), mesh=mesh), make_data()
    with pytest.raises(RankError, match="the other processes of the batch did not answer: one has ended"):
        Accumulator(model, micro_batch_size=2).backward(
            lambda piece: os._exit(1) if rank.rank else make_loss(model)(piece), data
        )


@pytest.mark.parametrize("name", ["dying", "dying_in_the_reduction", "dying_in_a_sharded_model"])
def test_a_process_that_dies_ends_the_others_and_none_is_left_behind(nursery, name):
    pair = Crew(nursery, 2, time_out=5)
    try:
        assert not pair.is_gone()
        assert pair.ask(2, __file__, name, {}) == {0: ""}
    finally:
        pair.end()
    assert pair.is_gone()


@on_ranks(2)
def test_windows_fail_together_too(rank):
    ddp = DistributedDataParallel(make_model(), process_group=rank.group)
    with pytest.raises(RankError, match="rank 1 failed .*no graph"):
        Accumulator(ddp).backward(
            lambda piece: torch.ones(()) if rank.rank else make_loss(ddp)(piece), Window([make_data(4), make_data(2)])
        )


@pytest.mark.parametrize("guilty", [0, 1])
@on_ranks(2)
def test_where_one_runs_out_of_memory_all_take_half_the_piece(rank, guilty):
    model, data = make_model(), make_data()
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    ddp = DistributedDataParallel(model, process_group=rank.group)
    mine = tuple(tensor[:6] if rank.rank else tensor[6:] for tensor in data)
    loss_fn, sizes = make_loss(ddp), []

    def limited(piece):
        sizes.append(len(piece[0]))
        return too_much_memory() if rank.rank == guilty and sizes[-1] > 1 else loss_fn(piece)

    accumulator = Accumulator(ddp, micro_batch_size="auto")
    accumulator.backward(limited, mine)
    assert_exact(take_gradients(model), whole)
    assert max(sizes[-len(mine[0]) :]) == 1
    sizes.clear()
    accumulator.backward(limited, mine)
    assert set(sizes) == {1}, "the size is remembered"


@on_ranks(2)
def test_where_not_even_one_row_fits_in_one_process_all_stop(rank):
    ddp = DistributedDataParallel(make_model(), process_group=rank.group)
    mine = tuple(tensor[:1] if rank.rank else tensor[1:] for tensor in make_data())
    with pytest.raises(RankError, match="rank 1 failed .*can't allocate memory") as caught:
        Accumulator(ddp, micro_batch_size="auto").backward(
            (lambda piece: too_much_memory()) if rank.rank else make_loss(ddp), mine
        )
    assert not caught.value.out_of_memory
