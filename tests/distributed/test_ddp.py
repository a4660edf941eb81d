"""DDP: the gradient of the global batch, however its rows lie in the processes and however they are cut."""

import warnings

import pytest
import torch
import torch.distributed as dist
from crew import Rank, on_ranks
from models import make_data, make_loss, make_model, take_gradients, whole_gradients
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from reference import assert_exact
from wholebatch import Mean, OptionError, RankError
from wholebatch.torch import Accumulator, Window, check, evaluate

ROWS = {
    2: {"equal": [5, 5], "unequal": [7, 3], "none on one": [10, 0], "none on the first": [0, 10], "one each": [1, 1]},
    4: {"equal": [3, 3, 3, 3], "unequal": [6, 1, 2, 4], "none on some": [0, 9, 0, 1]},
}
SYNC = ("once", "overlap")
OPTIONS = {
    "plain": {},
    "views of the buckets": {"gradient_as_bucket_view": True},
    "finding unused parameters": {"find_unused_parameters": True},
    "both": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "many buckets": {"bucket_cap_mb": 1e-5},
}


def replica(rank: Rank, model: nn.Module, **options) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=rank.group, **options)


def share(rank: Rank, data, rows):
    """This process's rows."""
    start = sum(rows[: rank.rank])
    return tuple(tensor[start : start + rows[rank.rank]] for tensor in data)


def assert_exact_in_every_cut(rank, rows, sync="once", **options):
    data = make_data(sum(rows))
    model = make_model()
    loss_fn = make_loss(model)
    whole = whole_gradients(model, lambda: loss_fn(data))
    expected = loss_fn(data).item()
    ddp = replica(rank, model, **options)
    for cut in ({}, {"micro_batch_size": 1}, {"micro_batch_size": 3}, {"num_micro_batches": 1 + rank.rank}):
        result = Accumulator(ddp, sync=sync, **cut).backward(make_loss(ddp), share(rank, data, rows))
        assert_exact(take_gradients(model), whole)
        assert result.loss.item() == pytest.approx(expected, rel=1e-12)
        assert (result.rows, result.count) == (sum(rows), sum(rows))


@pytest.mark.parametrize("rows", ROWS[2].values(), ids=ROWS[2])
@on_ranks(2)
def test_the_gradient_is_that_of_the_global_batch(rank, rows):
    assert_exact_in_every_cut(rank, rows)


@pytest.mark.parametrize("rows", ROWS[4].values(), ids=ROWS[4])
@on_ranks(4)
def test_and_in_four_processes(rank, rows):
    assert_exact_in_every_cut(rank, rows)


@on_ranks(1)
def test_a_group_of_one_is_one_process(rank):
    assert_exact_in_every_cut(rank, [10])
    with pytest.raises(ValueError, match="boom"):
        Accumulator(replica(rank, make_model())).backward(failing(ValueError("boom")), make_data())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@on_ranks(2)
def test_under_every_option_of_ddp(rank, options):
    for sync in SYNC:
        for rows in ([7, 3], [0, 10]):
            assert_exact_in_every_cut(rank, rows, sync, **options)


class Branching(nn.Module):
    """Layers that are used for some inputs only, and one that is not used at all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.never = (nn.Linear(4, 4).double() for _ in range(3))

    def forward(self, x):
        y = self.always(x).tanh()
        return self.sometimes(y) if x[0, 0] > 0 else y


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("positive", [[], [1], [4], [1, 4, 5]], ids=str)
@on_ranks(2)
def test_parameters_used_on_one_rank_in_one_piece_or_nowhere(rank, options, positive):
    x = -torch.ones(6, 4, dtype=torch.float64)
    x[positive] = 1
    model = Branching()

    def whole_loss():
        return torch.stack([model(row.unsqueeze(0)).square().sum() for row in x]).mean()

    whole = whole_gradients(model, whole_loss)
    ddp = replica(rank, model, **options)
    for sync in 2 * SYNC:
        accumulator = Accumulator(ddp, micro_batch_size=1, sync=sync)
        accumulator.backward(lambda piece: ddp(piece).square().sum(), x[3 * rank.rank :][:3])
        assert (model.sometimes.weight.grad is None) == (not positive)
        assert model.never.weight.grad is None
        assert_exact(take_gradients(model), whole)


@pytest.mark.parametrize("sync", SYNC)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@on_ranks(2)
def test_what_was_in_the_gradient_is_added_once_and_not_reduced(rank, options, sync):
    data, model = make_data(), make_model()
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    ddp = replica(rank, model, **options)
    accumulator = Accumulator(ddp, micro_batch_size=2, sync=sync)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(3):  # from the second on they may be views of the buckets
        accumulator.backward(make_loss(ddp), share(rank, data, [6, 4]))
    assert_exact({name: g - 1 for name, g in take_gradients(model).items()}, {name: 3 * g for name, g in whole.items()})
    for _ in range(2):
        accumulator.backward(make_loss(ddp), share(rank, data, [6, 4]))
    assert_exact(take_gradients(model), {name: 2 * g for name, g in whole.items()})


class Wire:
    """Counts what a DDP module sends."""

    def __init__(self, ddp, group):
        self.bytes = 0
        ddp.register_comm_hook(group, self._hook)

    def _hook(self, group, bucket):
        self.bytes += bucket.buffer().nbytes
        sent = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
        return sent.get_future().then(lambda future: future.value()[0])


def noting(all_gather, messages):
    """The same function, which writes down how many bytes it sends."""

    def noted(arrived, sent, **options):
        messages.append(sent.nbytes)
        return all_gather(arrived, sent, **options)

    return noted


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("pieces", [1, 4, 16])
@pytest.mark.parametrize("sync", SYNC)
@on_ranks(2)
def test_one_gradient_is_sent_for_any_number_of_pieces(rank, pieces, options, sync):
    model, data = make_model(), make_data(32)
    one_gradient = sum(parameter.nbytes for parameter in model.parameters())
    ddp = replica(rank, model, **options)
    wire = Wire(ddp, rank.group)
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    accumulator = Accumulator(ddp, num_micro_batches=pieces, sync=sync)
    messages = []
    with pytest.MonkeyPatch.context() as patch, profile(activities=[ProfilerActivity.CPU]) as seen:
        patch.setattr(dist, "all_gather", noting(dist.all_gather, messages))
        accumulator.backward(make_loss(ddp), share(rank, data, [16, 16]))
    assert wire.bytes == one_gradient
    assert_exact(take_gradients(model), whole)
    assert sum(messages) < 1024
    collectives = [event.name for event in seen.events() if event.name.startswith("gloo:")]
    assert collectives.count("gloo:all_gather") == len(messages) == (2 if sync == "once" else 3)

    # the plain loop, which synchronises every piece
    wire.bytes = 0
    for x, y in zip(*(tensor.chunk(pieces) for tensor in share(rank, data, [16, 16])), strict=True):
        (make_loss(ddp)((x, y)) / pieces).backward()
    assert wire.bytes == pieces * one_gradient
    assert_exact(take_gradients(model), whole, tolerance=1e-12 if pieces == 1 else 1e-1)


def in_bfloat16(group, bucket):
    """torch's own insists on NCCL."""
    sent = bucket.buffer().bfloat16().div_(group.size())
    future = dist.all_reduce(sent, group=group, async_op=True).get_future()
    return future.then(lambda future: bucket.buffer().copy_(future.value()[0]))


@on_ranks(2)
def test_a_hook_that_compresses_works_as_with_ddp(rank):
    data, model = make_data(), make_model().float()
    data = data[0].float(), data[1]
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    ddp = replica(rank, model)
    ddp.register_comm_hook(rank.group, in_bfloat16)
    Accumulator(ddp, micro_batch_size=2).backward(make_loss(ddp), share(rank, data, [7, 3]))
    actual = take_gradients(model)
    assert_exact(actual, whole, tolerance=2**-7)
    with pytest.raises(AssertionError, match="off by"):
        assert_exact(actual, whole, tolerance=1e-5)


@on_ranks(2)
def test_sixteen_bit_parameters_are_summed_in_more_and_sent_as_they_are(rank):
    data, model = make_data(), make_model().bfloat16()
    data = data[0].bfloat16(), data[1]
    wide = make_model()
    whole = whole_gradients(wide, lambda: make_loss(wide)((data[0].double(), data[1])))
    ddp = replica(rank, model)
    wire = Wire(ddp, rank.group)
    for rows, sync in (([7, 3], "once"), ([0, 10], "once"), ([7, 3], "overlap"), ([0, 10], "overlap")):
        wire.bytes = 0
        Accumulator(ddp, micro_batch_size=1, sync=sync).backward(make_loss(ddp), share(rank, data, rows))
        assert wire.bytes == sum(parameter.nbytes for parameter in model.parameters())
        assert all(p.grad.dtype == p.grad_dtype == torch.bfloat16 for p in model.parameters())
        actual = {name: p.grad.double().numpy() for name, p in model.named_parameters()}
        assert_exact(actual, whole, tolerance=2**-5)
        model.zero_grad()


class Counting(nn.Module):
    """A model with buffers: one that it writes, a cache that it reads, and statistics that stay as they are."""

    def __init__(self, rank):
        super().__init__()
        self.inner, self.norm = make_model(), nn.BatchNorm1d(4).double().eval()
        self.register_buffer("seen", torch.full((), float(rank)))
        self.register_buffer("cache", torch.arange(4.0).double().cos(), persistent=False)

    def forward(self, x):
        self.seen += len(x)
        return self.inner(self.norm(x) * self.cache)


@pytest.mark.parametrize("rows", [[7, 3], [10, 0], [0, 10]], ids=str)
@on_ranks(2)
def test_buffers_are_synchronised_once_by_every_process(rank, rows):
    data, model = make_data(), Counting(0)
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    ddp = replica(rank, Counting(0))
    ddp.module.seen.fill_(100 * (1 + rank.rank))
    for step in range(2):
        start = ddp.module.seen.item() if rank.rank == 0 else None
        Accumulator(ddp, micro_batch_size=2).backward(make_loss(ddp), share(rank, data, rows))
        starts = [None, None]
        dist.all_gather_object(starts, start, group=rank.group)
        assert ddp.module.seen.item() == starts[0] + rows[rank.rank], f"what rank 0 had, and one's own rows ({step})"
        assert_exact(take_gradients(ddp.module), whole)
    assert ddp.require_backward_grad_sync
    assert ddp.require_forward_param_sync


@pytest.mark.parametrize("in_place", [True, False])
@on_ranks(2)
def test_every_piece_is_summed_in_place(rank, in_place):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(24, 50)).double()
    x, y = torch.randint(50, (12, 3)), torch.randint(50, (12,))
    whole = whole_gradients(model, lambda: make_loss(model)((x, y)))
    ddp = replica(rank, model, find_unused_parameters=True)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        accumulator = Accumulator(ddp, micro_batch_size=1, in_place=in_place)
        accumulator.backward(make_loss(ddp), share(rank, (x, y), [8, 4]))
    assert_exact(take_gradients(model), whole)
    added = sum(event.name in ("aten::addmm_", "aten::index_add_") for event in seen.events())
    assert added == (2 * ([8, 4][rank.rank] - 1) if in_place else 0), "the first piece makes the gradients"


@on_ranks(2)
def test_sparse_gradients(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(24, 5)).double()
    x, y = torch.randint(50, (12, 3)), torch.randint(5, (12,))
    whole = whole_gradients(model, lambda: make_loss(model)((x, y)))
    ddp = replica(rank, model)
    for rows in ([8, 4], [0, 12]):
        Accumulator(ddp, micro_batch_size=3).backward(make_loss(ddp), share(rank, (x, y), rows))
        assert model[0].weight.grad.is_sparse
        assert_exact(take_gradients(model), whole)


@on_ranks(2)
def test_several_ddp_modules_and_one_inside_another(rank):
    data, first, second = make_data(), make_model(), nn.Linear(3, 3).double()
    torch.manual_seed(1)
    nn.init.normal_(second.weight)
    nn.init.zeros_(second.bias)
    both = nn.ModuleList([first, second])
    whole = whole_gradients(both, lambda: make_loss(lambda x: second(first(x)))(data))
    for wrap in (list, lambda modules: nn.Sequential(*modules)):
        parts = [replica(rank, first), replica(rank, second)]
        loss_fn = make_loss(lambda x, parts=parts: parts[1](parts[0](x)))
        Accumulator(wrap(parts), micro_batch_size=2).backward(loss_fn, share(rank, data, [3, 7]))
        assert_exact(take_gradients(both), whole)


@on_ranks(2)
def test_layers_frozen_after_wrapping(rank):
    data, model = make_data(), make_model()
    ddp = replica(rank, model, find_unused_parameters=True)
    model[0].requires_grad_(False)
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    for _ in range(2):
        Accumulator(ddp, micro_batch_size=2).backward(make_loss(ddp), share(rank, data, [3, 7]))
        assert model[0].weight.grad is None
        assert_exact(take_gradients(model), whole)


@on_ranks(2)
def test_a_training_run_ends_where_one_process_ends(rank):
    data, model, alone = make_data(40), make_model(), make_model()
    ddp = replica(rank, model)
    both = {}
    for name, trained, loss_fn in (("alone", alone, make_loss(alone)), ("ddp", ddp, make_loss(ddp))):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        accumulator = Accumulator(trained, micro_batch_size=3)
        norms = []
        for step in range(4):
            batch = tuple(tensor[10 * step : 10 * step + 10] for tensor in data)
            mine = batch if name == "alone" else share(rank, batch, [10 - 3 * step, 3 * step])
            result = accumulator.step(loss_fn, mine, optimizer, max_norm=0.1, scheduler=scheduler)
            assert result.stepped
            norms.append(result.grad_norm.item())
        both[name] = {f"norm {i}": torch.tensor(norm).double() for i, norm in enumerate(norms)}
        both[name] |= dict((trained if name == "alone" else trained.module).state_dict())
    assert (both["alone"]["0.weight"] - make_model()[0].weight).abs().max() > 1e-3, "training moved the weights"
    assert_exact(both["ddp"], both["alone"], tolerance=1e-9)


@pytest.mark.parametrize("pieces", [[3, 3], [4, 0], [0, 2]], ids=str)
@on_ranks(2)
def test_a_loop_that_adds(rank, pieces):
    data, model = make_data(sum(2 * n for n in pieces)), make_model()
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    ddp = replica(rank, model)
    accumulator = Accumulator(ddp)
    mine = share(rank, data, [2 * n for n in pieces])
    for kind in ("scalar", "Mean"):
        for x, y in zip(*(tensor.split(2) for tensor in mine), strict=True) if pieces[rank.rank] else ():
            with ddp.no_sync():
                loss = make_loss(ddp)((x, y))
            accumulator.add(loss if kind == "scalar" else Mean(loss * len(x), len(x)), rows=len(x))
        result = accumulator.finish()
        assert result.rows == len(data[0])
        assert_exact(take_gradients(model), whole)


@on_ranks(2)
def test_a_loop_that_synchronises_each_piece_is_refused(rank):
    model = make_model()
    ddp = replica(rank, model)
    accumulator = Accumulator(ddp)
    with pytest.raises(RankError, match="within `with model.no_sync\\(\\):`"):
        accumulator.add(make_loss(ddp)(make_data()), rows=10)
    assert all(parameter.grad is None for parameter in model.parameters())
    with ddp.no_sync():
        loss = make_loss(ddp)(make_data())
    accumulator.add(loss, rows=10)
    assert accumulator.finish().rows == 20


@pytest.mark.parametrize("who", [[0, 1], [0]], ids=["every rank", "one rank"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@on_ranks(2)
def test_forwards_and_steps_outside_of_batches_do_not_disturb_them(rank, options, who):
    model, data = make_model(), make_data()
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    ddp = replica(rank, model, **options)
    for _ in range(2):
        if rank.rank in who:
            ddp(data[0])  # DDP now expects a backward, which does not come
        Accumulator(ddp, micro_batch_size=2).backward(make_loss(ddp), share(rank, data, [6, 4]))
        assert_exact(take_gradients(model), whole)
        make_loss(ddp)(share(rank, data, [5, 5])).backward()
        assert_exact(take_gradients(model), whole)


@on_ranks(2)
def test_without_a_ddp_module_every_process_is_by_itself(rank):
    model, data = make_model(), make_data(6 + rank.rank)
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    result = Accumulator(model, micro_batch_size=2).backward(make_loss(model), data)
    assert result.rows == 6 + rank.rank
    assert_exact(take_gradients(model), whole)


@on_ranks(2)
def test_evaluation_and_check_are_of_one_process(rank):
    ddp, data = replica(rank, Counting(0)), make_data(12)
    mine = share(rank, data, [9, 3])
    loader = list(zip(*(tensor.split(3) for tensor in mine), strict=True))
    result = evaluate(ddp, make_loss(ddp), loader)  # three batches here, one there: an exchange would not end
    assert result.rows == [9, 3][rank.rank]
    ddp, mine = replica(rank, make_model()), share(rank, data, [9, 3])
    assert check(ddp, make_loss(ddp), mine).exact
    assert not check(ddp, lambda piece: ddp(piece[0]).mean(0).square().sum(), mine).exact


def failing(error):
    def loss_fn(piece):
        raise error

    return loss_fn


@on_ranks(2)
def test_what_cannot_be_done_is_refused_with_the_reason(rank):
    ddp = replica(rank, make_model(), static_graph=True)
    with pytest.raises(OptionError, match="static_graph=True\\) expects each iteration to fire the hooks of its first"):
        Accumulator(ddp).backward(make_loss(ddp), make_data())
    assert evaluate(ddp, make_loss(ddp), [make_data()]).rows == 10, "no gradient, no refusal"
    for attribute, words in (("mixed_precision", "use torch.autocast"), ("_use_python_reducer", "without its reducer")):
        ddp = replica(rank, make_model())
        setattr(ddp, attribute, True)
        with pytest.raises(OptionError, match=words):
            Accumulator(ddp).backward(make_loss(ddp), make_data())
    data, normalised = make_data(), nn.Sequential(nn.BatchNorm1d(4), make_model()).double()
    ddp = replica(rank, normalised)
    with pytest.raises(RankError, match="in training mode with statistics of the batch"):
        Accumulator(ddp).backward(make_loss(ddp), data)


@on_ranks(4)
def test_modules_of_different_groups_are_refused(rank):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = Rank(rank.rank, 2, halves[rank.rank // 2])
    models = [replica(rank, make_model()), replica(half, make_model())]
    with pytest.raises(OptionError, match="belong to process groups of different ranks"):
        Accumulator(models).backward(make_loss(models[0]), make_data())


class Synchronised(nn.SyncBatchNorm):
    """torch's own runs on GPUs only; this one has the same exchange, and normalises like BatchNorm."""

    def forward(self, x):
        dist.all_reduce(torch.ones(()), group=self.process_group)
        return nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, True, self.momentum
        )


@on_ranks(2)
def test_modules_that_exchange_something_in_their_forward_run_in_step(rank):
    model = nn.Sequential(nn.BatchNorm1d(4), make_model()).double()
    ddp, data = replica(rank, model), make_data()
    model[0].__class__, model[0].process_group = Synchronised, rank.group  # DDP would look for a GPU
    accumulator = Accumulator(ddp, micro_batch_size=2, batch_norm="micro")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accumulator.backward(make_loss(ddp), share(rank, data, [8, 2]))  # four pieces here, one there
    apart = nn.Sequential(nn.BatchNorm1d(4), make_model()).double()
    pieces = [tuple(tensor[start : start + 2] for tensor in data) for start in range(0, 10, 2)]
    loss_fn = make_loss(apart)
    whole = whole_gradients(apart, lambda: torch.stack([loss_fn(piece) * 2 for piece in pieces]).sum() / 10)
    assert_exact(take_gradients(model), whole)
    with pytest.raises(ValueError, match="rank 1 has no rows: with fully_shard or SyncBatchNorm every process"):
        accumulator.backward(make_loss(ddp), share(rank, data, [10, 0]))


@on_ranks(1)
def test_one_process_leaves_unused_parameters_alone_too(rank):
    model = Branching()
    ddp = replica(rank, model)
    for sync in SYNC:
        Accumulator(ddp, sync=sync).backward(lambda x: ddp(x).square().mean(), -torch.ones(3, 4, dtype=torch.float64))
        assert model.always.weight.grad is not None
        assert model.sometimes.weight.grad is None
        model.zero_grad()


@on_ranks(2)
def test_an_empty_batch_is_an_error_only_if_it_is_empty_everywhere(rank):
    ddp = replica(rank, make_model())
    empty = tuple(tensor[:0] for tensor in make_data())
    for batch in (empty, Window([empty, empty])):
        with pytest.raises(ValueError, match="the batch is empty: it has 0 rows in each of 2 processes"):
            Accumulator(ddp).backward(make_loss(ddp), batch)
    with pytest.raises(ValueError, match="nothing was added in any process"):
        Accumulator(ddp).finish()
    batch = Window([empty]) if rank.rank else Window([make_data()])
    assert Accumulator(ddp).backward(make_loss(ddp), batch).rows == 10


@on_ranks(2)
def test_a_batch_that_counts_nothing_anywhere_gives_zeros(rank):
    ddp, data = replica(rank, make_model()), make_data()
    result = Accumulator(ddp, micro_batch_size=2).backward(lambda piece: Mean(ddp(piece[0]).sum() * 0, 0), data)
    assert (result.loss.item(), result.count) == (0, 0)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in ddp.parameters())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    accumulator = Accumulator(ddp)
    assert not accumulator.step(lambda piece: Mean(ddp(piece[0]).sum() * 0, 0), data, optimizer).stepped
    assert accumulator.skipped == 1
