"""FSDP2: shards of the parameters in every process, and the gradient of the global batch all the same."""

import copy
import time
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from crew import on_ranks
from models import make_data, make_loss, make_model, whole_gradients
from test_conformance import PARAMS, Leaves
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from conformance.cases import CUTS, LOSSES, STRUCTURES, make_batch
from conformance.torch_adapter import to_torch, whole
from reference import assert_exact
from wholebatch import BatchError, Mean, OptionError, RankError
from wholebatch.torch import Accumulator

SYNC = ("once", "every")


def mesh_of(rank) -> DeviceMesh:
    return DeviceMesh.from_group(rank.group, "cpu")


def sharded(rank, model: nn.Module, layers=(), **options) -> nn.Module:
    mesh = mesh_of(rank)
    for layer in layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def full_gradients(model):
    """Copies of the whole gradients by name, which are then cleared."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.grad is not None]
    taken = {name: parameter.grad.full_tensor().numpy().copy() for name, parameter in named}
    model.zero_grad()
    return taken


def share(rank, data, rows):
    start = sum(rows[: rank.rank])
    return tuple(tensor[start : start + rows[rank.rank]] for tensor in data)


@pytest.mark.parametrize("sync", SYNC)
@pytest.mark.parametrize("rows", [[5, 5], [7, 3], [1, 9]], ids=str)
@on_ranks(2)
def test_the_gradient_is_that_of_the_global_batch(rank, rows, sync):
    assert_exact_in_every_cut(rank, rows, sync)


@pytest.mark.parametrize("sync", SYNC)
@on_ranks(4)
def test_and_in_four_processes(rank, sync):
    assert_exact_in_every_cut(rank, [2, 1, 6, 3], sync)


def assert_exact_in_every_cut(rank, rows, sync):
    data, model = make_data(sum(rows)), make_model()
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    expected = make_loss(model)(data).item()
    sharded(rank, model, [model[0]])
    for cut in ({}, {"micro_batch_size": 1}, {"micro_batch_size": 3}, {"num_micro_batches": 1 + rank.rank}):
        result = Accumulator(model, sync=sync, **cut).backward(make_loss(model), share(rank, data, rows))
        assert_exact(full_gradients(model), whole)
        assert result.loss.item() == pytest.approx(expected, rel=1e-12)
        assert (result.rows, result.count) == (sum(rows), sum(rows))


def loss_of(case, model, piece):
    """The module returns tensors, as fully_shard needs to see them, and the loss is put together outside."""
    spec = None

    def parts(params):
        nonlocal spec
        tensors, spec = tree_flatten(case.split(params, piece, torch))
        return tensors

    return tree_unflatten(model(parts), spec)


@pytest.mark.parametrize("name", LOSSES)
@on_ranks(2)
def test_every_loss_form(rank, name):
    case, rows = LOSSES[name], [3, 7]
    batch = make_batch(sum(rows))
    mine = {key: array[sum(rows[: rank.rank]) :][: rows[rank.rank]] for key, array in batch.items()}
    loss, expected = whole(case.whole, PARAMS, batch)
    counts = case.counts
    if name == "one mean beside a scalar and a sum":
        counts = lambda piece: {"nll": piece["mask"].sum()}  # noqa: E731
    for sync in SYNC:
        model = sharded(rank, Leaves())
        for cut in CUTS.values():
            accumulator = Accumulator(model, sync=sync, **cut)
            loss_fn = partial(loss_of, case, model)
            if counts is not case.counts:
                with pytest.raises(RankError, match="give counts= to .backward or .step"):
                    accumulator.backward(loss_fn, STRUCTURES["dict"].pack(to_torch(mine)))
            result = accumulator.backward(loss_fn, STRUCTURES["dict"].pack(to_torch(mine)), counts=counts)
            assert_exact(full_gradients(model), expected)
            assert result.loss.item() == pytest.approx(loss, rel=1e-12)


def collectives(profile) -> dict[str, int]:
    """Bytes-carrying collectives by name, and how many there were."""
    names = [event.name for event in profile.events() if event.name.startswith("gloo:")]
    return {name: names.count(name) for name in set(names)}


@pytest.mark.parametrize("sync", SYNC)
@on_ranks(2)
def test_gradients_are_reduced_once_or_in_every_piece(rank, sync):
    model, data = make_model(), make_data(32)
    sharded(rank, model)
    accumulator = Accumulator(model, micro_batch_size=2, sync=sync)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        accumulator.backward(make_loss(model), share(rank, data, [16, 16]))
    sent = collectives(profile)
    reduced = sum(number for name, number in sent.items() if "reduce" in name)
    assert reduced == (1 if sync == "once" else 8), sent


@pytest.mark.parametrize("sync", SYNC)
@on_ranks(2)
def test_a_training_run_clips_by_the_norm_over_all_shards(rank, sync):
    data, alone = make_data(40), make_model()
    model = sharded(rank, copy.deepcopy(alone))
    runs = {}
    for name, trained in (("alone", alone), ("sharded", model)):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05)
        accumulator = Accumulator(trained, micro_batch_size=3, sync=sync)
        norms = []
        for step in range(4):
            batch = tuple(tensor[10 * step : 10 * step + 10] for tensor in data)
            mine = batch if name == "alone" else share(rank, batch, [9 - 2 * step, 1 + 2 * step])
            result = accumulator.step(make_loss(trained), mine, optimizer, max_norm=0.1)
            norms.append(result.grad_norm.item())
        runs[name] = {f"norm {i}": torch.tensor(norm).double() for i, norm in enumerate(norms)}
        for key, parameter in trained.named_parameters():
            runs[name][key] = (parameter if name == "alone" else parameter.full_tensor()).detach()
    assert (runs["alone"]["0.weight"] - make_model()[0].weight).abs().max() > 1e-3, "training moved the weights"
    assert_exact(runs["sharded"], runs["alone"], tolerance=1e-9)


@pytest.mark.parametrize("sync", SYNC)
@on_ranks(2)
def test_what_was_in_the_gradient_is_added(rank, sync):
    model, data = make_model(), make_data()
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    sharded(rank, model)
    accumulator = Accumulator(model, micro_batch_size=2, sync=sync)
    for _ in range(3):
        accumulator.backward(make_loss(model), share(rank, data, [6, 4]))
    assert_exact(full_gradients(model), {name: 3 * gradient for name, gradient in whole.items()})


@pytest.mark.parametrize("sync", SYNC)
@on_ranks(4)
def test_shards_that_are_replicated(rank, sync):
    model, data = make_model(), make_data(12)
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    Accumulator(model, micro_batch_size=2, sync=sync).backward(make_loss(model), share(rank, data, [5, 1, 2, 4]))
    assert_exact(full_gradients(model), whole)


@on_ranks(4)
def test_meshes_that_are_not_supported_are_refused(rank):
    whole = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("all",))
    square = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("tensor", "data"))
    model = make_model()
    fully_shard(model[0], mesh=whole)
    fully_shard(model, mesh=square["data"])
    with pytest.raises(OptionError, match="sharded over different device meshes"):
        Accumulator(model).backward(make_loss(model), make_data())


@on_ranks(2)
def test_tensor_parallel_models_work_as_in_one_process(rank):
    model, data = make_model(), make_data()
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    norm = np.sqrt(sum((gradient**2).sum() for gradient in whole.values()))
    parallelize_module(model, mesh_of(rank), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    accumulator = Accumulator(model, micro_batch_size=3)
    for _ in range(2):
        accumulator.backward(make_loss(model), data)
    assert_exact(full_gradients(model), {name: 2 * gradient for name, gradient in whole.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start = {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}
    result = accumulator.step(make_loss(model), data, optimizer, max_norm=0.1)
    assert result.grad_norm.item() == pytest.approx(norm, rel=1e-12)
    moved = {name: (start[name] - parameter.full_tensor()).detach() for name, parameter in model.named_parameters()}
    assert_exact(moved, {name: gradient * 0.1 / norm for name, gradient in whole.items()}, tolerance=1e-4)


def data_by_tensor(model):
    """Tensor parallelism in pairs of processes, and the two pairs."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return mesh["data"]


@pytest.mark.parametrize("sync", SYNC)
@on_ranks(4)
def test_shards_of_tensor_parallel_parameters(rank, sync):
    model, data = make_model(), make_data()
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    across = data_by_tensor(model)
    fully_shard(model, mesh=across)
    rows = [slice(0, 7), slice(7, 10)][across.get_local_rank()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about its own output, and about how it gathers the gradients
        result = Accumulator(model, micro_batch_size=2, sync=sync).backward(
            make_loss(model), tuple(tensor[rows] for tensor in data)
        )
        assert_exact(full_gradients(model), whole)
    assert result.rows == 10


@on_ranks(4)
def test_ddp_around_a_tensor_parallel_module_is_refused(rank):
    model = make_model()
    ddp = DistributedDataParallel(model, device_mesh=data_by_tensor(model))
    with pytest.raises(OptionError, match="makes new parameters in each forward.* use fully_shard for the data axis"):
        Accumulator(ddp).backward(make_loss(ddp), make_data())


@on_ranks(2)
def test_a_divide_factor_of_ones_own(rank):
    model, data = make_model(), make_data()
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    sharded(rank, model)
    model.set_gradient_divide_factor(5.0)
    Accumulator(model, micro_batch_size=2).backward(make_loss(model), share(rank, data, [6, 4]))
    assert_exact(full_gradients(model), whole)


@on_ranks(2)
def test_mixed_precision_is_summed_as_its_policy_says(rank):
    model, data = make_model().float(), make_data()
    data = data[0].float(), data[1]
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded(rank, model, mp_policy=policy)
    for sync in SYNC:
        accumulator = Accumulator(model, micro_batch_size=2, sync=sync)
        accumulator.backward(make_loss(model), share(rank, data, [6, 4]))
        assert_exact(full_gradients(model), whole, tolerance=2**-5)


@on_ranks(2)
def test_a_module_that_hides_its_output_is_refused(rank):
    model = sharded(rank, Leaves())
    with pytest.raises(BatchError, match="fully_shard did not reduce the gradients"):
        Accumulator(model).backward(
            lambda piece: model(lambda params: Mean((params["tied"] * piece.sum()).sum(), 1)), torch.ones(2, 1)
        )


@on_ranks(2)
def test_after_a_forward_that_left_the_model_whole(rank):
    model, data = make_model(), make_data()
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    sharded(rank, model, [model[0]])
    with torch.no_grad():
        model(data[0])
    Accumulator(model, micro_batch_size=2).backward(make_loss(model), share(rank, data, [6, 4]))
    assert_exact(full_gradients(model), whole)


@on_ranks(2)
def test_what_cannot_be_done_is_refused(rank):
    model, data = sharded(rank, make_model()), make_data()
    with pytest.raises(
        ValueError, match="rank 1 has no rows: with fully_shard or SyncBatchNorm every process runs the model in step"
    ):
        Accumulator(model).backward(make_loss(model), share(rank, data, [10, 0]))
    ddp = DistributedDataParallel(make_model(), process_group=rank.group)
    with pytest.raises(OptionError, match='sync="every" is for fully_shard'):
        Accumulator(ddp, sync="every").backward(make_loss(ddp), data)
    with pytest.raises(OptionError, match='sync="overlap" is for DistributedDataParallel'):
        Accumulator(model, sync="overlap").backward(make_loss(model), data)
    with pytest.raises(OptionError, match='sync must be "once", "overlap" or "every", got \'twice\''):
        Accumulator(model, sync="twice")
    with pytest.raises(OptionError, match="both DistributedDataParallel and fully_shard"):
        Accumulator([ddp, model]).backward(make_loss(ddp), data)


@on_ranks(2)
def test_what_fails_on_every_rank_at_once_leaves_no_trace(rank):
    model, data = sharded(rank, make_model()), make_data()
    whole = whole_gradients(make := make_model(), lambda: make_loss(make)(data))
    for sync in SYNC:
        calls = 0

        def failing(piece):
            nonlocal calls
            calls += 1
            if calls == 2:
                raise ValueError("boom")
            return make_loss(model)(piece)

        accumulator = Accumulator(model, micro_batch_size=2, sync=sync)
        with pytest.raises(RankError, match="failed in a batch that it shares: ValueError: boom"):
            accumulator.backward(failing, share(rank, data, [5, 5]))
        assert all(parameter.grad is None for parameter in model.parameters())
        accumulator.backward(make_loss(model), share(rank, data, [5, 5]))
        assert_exact(full_gradients(model), whole)
    with pytest.raises(RankError, match="rank 1 failed .*nothing to cut"):
        accumulator.backward(make_loss(model), torch.zeros(()) if rank.rank else data)
    with pytest.raises(RankError, match="rank 1 failed .*piece 1 of 2 is nan"):
        accumulator.backward(
            lambda piece: make_loss(model)(piece) * (float("nan") if rank.rank else 1), share(rank, data, [4, 4])
        )
    assert all(parameter.grad is None for parameter in model.parameters())


@on_ranks(2)
def test_a_failure_within_a_piece_ends_at_the_time_out_and_is_named(rank):
    rank = rank.impatient()
    model, data = sharded(rank, make_model()), make_data()
    calls, start = 0, time.monotonic()

    def failing(piece):
        nonlocal calls
        calls += 1
        if calls == 2 and rank.rank:
            raise ValueError("boom")
        return make_loss(model)(piece)

    with pytest.raises(RankError, match="rank 1 failed in a batch that it shares: ValueError: boom") as caught:
        Accumulator(model, micro_batch_size=2).backward(failing, data)
    assert caught.value.rank == 1
    assert time.monotonic() - start < 30
    assert all(parameter.grad is None for parameter in model.parameters())
