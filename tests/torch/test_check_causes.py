"""`check` says of each loss why its split is not exact, and of sound ones nothing."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from broken import CASES, mlp, rows
from torch import nn

from wholebatch.torch import check


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_cause_is_told(case):
    report = check(*case.make())
    assert report.cause == case.cause
    assert report.exact == (case.cause in (None, "rounding"))
    assert (report.remedy is None) == (case.cause is None)
    assert max(map(len, str(report).splitlines())) <= 80


def test_the_table_holds_every_cause_and_many_sound_losses():
    causes = Counter(case.cause for case in CASES.values())
    assert causes[None] >= 30
    assert causes.total() - causes[None] >= 30
    assert len(causes) == 10


NOISY = [name for name, case in CASES.items() if case.cause == "randomness"]


@pytest.mark.parametrize("name", NOISY)
def test_a_random_loss_is_exact_without_its_randomness(name):
    report = check(*CASES[name].make())
    assert report.exact_without_randomness
    assert "with the same draw for every row the split is exact" in str(report)


@pytest.mark.parametrize("of_loss", [np.random.default_rng(0), np.random])
def test_behind_numbers_that_numpy_draws_for_each_row_nothing_else_is_claimed(of_loss):
    model, batch = mlp(), rows()
    noise = lambda b: torch.from_numpy(of_loss.normal(size=b["x"].shape)).to(b["x"])  # noqa: E731
    report = check(model, lambda b: model(b["x"] + noise(b)).square().mean(), batch)
    assert report.causes == ("randomness",)
    assert report.exact_without_randomness is None
    assert "with the same draw" not in str(report)


def test_what_is_wrong_besides_randomness_is_told_too():
    model = mlp(nn.Dropout(0.2))
    report = check(model, lambda b: nn.functional.cross_entropy(model(b["x"]), b["y"], reduction="sum"), rows())
    assert set(report.causes) == {"sum-as-mean", "randomness"}
    assert not report.exact_without_randomness


def test_what_is_wrong_besides_batch_statistics_is_told_too():
    model = mlp(nn.BatchNorm1d(8))
    report = check(model, lambda b: nn.functional.cross_entropy(model(b["x"]), b["y"], reduction="sum"), rows())
    assert set(report.causes) == {"sum-as-mean", "batch-statistics"}
    assert "also    " in str(report)


def test_the_term_or_the_module_or_the_tensor_is_named():
    assert check(*CASES["one term of several"].make()).remedy.startswith("term 'nll': ")
    assert check(*CASES["BatchNorm1d"].make()).remedy.startswith("1 (BatchNorm1d): ")
    assert check(*CASES["class weights as long as the batch"].make()).remedy.startswith(
        'batch["weight"] is not per row: '
    )


def fails_in_pieces():
    model = mlp()

    def loss_fn(b):
        if len(b["x"]) < 7:
            raise RuntimeError("no pieces here")
        return model(b["x"]).square().mean()

    return model, loss_fn, rows()


def fails_at_once():
    return mlp(), lambda b: 1 / 0, rows()


UNTOUCHED = [
    "BatchNorm1d",
    "dropout",
    "a generator of its own",
    "NumPy's random numbers",
    "a generator of NumPy's of its own",
    "a moving average as a target",
]


@pytest.mark.parametrize("make", [*(CASES[name].make for name in UNTOUCHED), fails_in_pieces, fails_at_once])
def test_nothing_is_touched_also_where_it_fails(make):
    model, loss_fn, batch = make()
    model.train()
    first, second = list(model.parameters())[:2]
    first.grad = gradient = torch.ones_like(first)
    tensors = dict(model.state_dict(keep_vars=True))
    contents = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    held = [cell.cell_contents for cell in loss_fn.__closure__ or ()]
    own = [generator for generator in held if isinstance(generator, torch.Generator)]
    of_numpy = [generator for generator in held if isinstance(generator, np.random.Generator)]
    drawn = [generator.get_state() for generator in own]
    drawn_by_numpy = [generator.bit_generator.state for generator in of_numpy]
    try:
        check(model, loss_fn, batch)
    except ZeroDivisionError:
        assert make is fails_at_once
    assert model.training
    assert all(module.training for module in model.modules())
    assert first.grad is gradient
    assert torch.equal(gradient, torch.ones_like(first))
    assert second.grad is None
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is tensors[name]
        assert tensor.dtype == contents[name].dtype
        assert torch.equal(tensor, contents[name])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), repr(np.random.get_state())) == before[1:]
    assert all(torch.equal(generator.get_state(), state) for generator, state in zip(own, drawn, strict=True))
    assert [generator.bit_generator.state for generator in of_numpy] == drawn_by_numpy


def test_pieces_that_fail_for_a_reason_of_their_own_have_no_cause():
    report = check(*fails_in_pieces())
    assert not report.exact
    assert report.cause is None
    assert "no pieces here" in report.failure
    assert "none of those that are known" in str(report)


def test_a_compiled_model_is_judged():
    model = mlp(nn.BatchNorm1d(8)).eval()
    compiled = torch.compile(model, backend="eager")
    assert check(compiled, lambda b: compiled(b["x"]).square().mean(), rows()).exact
    assert check(compiled, lambda b: compiled(b["x"]).square().sum(), rows()).cause == "sum-as-mean"


def test_a_distributed_model_is_judged(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(mlp())
        synchronised = []

        def loss_fn(b):
            synchronised.append(model.require_backward_grad_sync)
            return model(b["x"]).square().mean()

        assert check(model, loss_fn, rows()).exact
        assert check(model, lambda b: model(b["x"]).square().sum(), rows()).cause == "sum-as-mean"
        assert not any(synchronised)
        assert model.require_backward_grad_sync
    finally:
        torch.distributed.destroy_process_group()


def test_parameters_alone_are_judged():
    model = mlp(nn.BatchNorm1d(8))
    report = check(list(model.parameters()), lambda b: model(b["x"]).square().mean(), rows())
    assert report.cause == "batch-statistics"
