"""Plan: the memory that it predicts is the memory that a step takes, and nothing is touched."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from allocated import peak_of
from to_plan import GPT, bert, convolutions, gpt, many_uses, mixture_of_experts, small_gpt, t5
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from wholebatch import BatchError, BudgetError, Mean, OptionError, OptionTypeError, PlanError
from wholebatch.torch import Accumulator, Window, plan
from wholebatch.torch._tree import map_tensors

AMPLE = "64GiB"


def measured(make, size, optimizer=torch.optim.AdamW, **options):
    """The peak of a step that finds the optimizer's state; two pieces show what more of them do."""

    def program():
        model, loss_fn, batch = make(rows=size if size == 16 else 2 * size)
        stepper = optimizer(model.parameters(), lr=1e-3)
        accumulator = Accumulator(model, micro_batch_size=size, **options)
        for rows in (map_tensors(lambda tensor: tensor[:1], batch), batch):
            accumulator.step(loss_fn, rows, stepper, max_norm=1.0)

    return peak_of(program)


def predicted(make, optimizer=torch.optim.AdamW, **options):
    model, loss_fn, batch = make()
    return plan(model, loss_fn, batch, memory=AMPLE, optimizer=optimizer(model.parameters(), lr=1e-3), **options)


CASES = {
    "the benchmark's GPT": (gpt, {}, (1, 4, 16)),
    "GPT": (small_gpt, {}, (1, 4, 16)),
    "GPT, in place": (small_gpt, {"in_place": True}, (1, 4)),
    "GPT, not in place": (small_gpt, {"in_place": False}, (1, 4)),
    "GPT in bf16, summed in float32": (partial(small_gpt, dtype=torch.bfloat16), {}, (1, 4, 16)),
    "GPT in bf16, summed in bf16": (partial(small_gpt, dtype=torch.bfloat16), {"accum_dtype": torch.bfloat16}, (4,)),
    "convolutions": (convolutions, {"batch_norm": "micro"}, (1, 4, 16)),
    "BERT": (bert, {}, (1, 16)),
    "T5": (t5, {}, (4,)),
    "a tensor that is used many times": (many_uses, {}, (1, 4, 16)),
}


@pytest.mark.filterwarnings("ignore:.*normalised by the statistics of each piece")
@pytest.mark.parametrize(("make", "options", "sizes"), CASES.values(), ids=CASES)
def test_the_predicted_peak_is_the_measured_one(make, options, sizes):
    found = predicted(make, **options)
    for size in sizes:
        batches_differ = found.peak(size) - _bytes(make()[2]) + _bytes(make(rows=size if size == 16 else 2 * size)[2])
        assert batches_differ == pytest.approx(measured(make, size, **options), rel=0.01), size


def _bytes(batch):
    tensors = batch.values() if isinstance(batch, dict) else [batch] if isinstance(batch, torch.Tensor) else batch
    return sum(tensor.nbytes for tensor in tensors)


def test_the_measurement_sees_another_size():
    assert predicted(small_gpt).peak(6) > 1.2 * measured(small_gpt, 4)


def test_experts_that_the_host_computes_in_float32_are_followed():
    taken = measured(mixture_of_experts, 4) + 8 * 32 * 8  # the other half of the batch
    assert predicted(mixture_of_experts).peak(4) == pytest.approx(taken, rel=0.03)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adafactor, torch.optim.RAdam])
def test_other_optimizers(optimizer):
    found, taken = predicted(small_gpt, optimizer), measured(small_gpt, 4, optimizer)
    assert found.peak(4) == pytest.approx(taken, rel=0.03)


RESIDENT = """
import re, sys
from pathlib import Path
import torch
from to_plan import gpt
from wholebatch.torch import Accumulator, plan

def resident(what):
    return int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

torch.set_num_threads(1)
model, loss_fn, batch = gpt(rows=8)
expected = plan(model, loss_fn, batch, memory="64GiB", optimizer=torch.optim.AdamW)
was_there = expected.parts["parameters"] + batch.nbytes
optimizer = torch.optim.AdamW(model.parameters())
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
for _ in range(2):
    Accumulator(model, micro_batch_size=4).step(loss_fn, batch, optimizer, max_norm=1.0)
print(expected.peak(4) - was_there, resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_the_predicted_peak_is_the_growth_of_the_process():
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", RESIDENT]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    expected, grown = map(int, said.split())
    assert expected == pytest.approx(grown, rel=0.10)


def test_the_plan_is_the_largest_size_that_fits():
    model, loss_fn, batch = small_gpt()
    found = plan(model, loss_fn, batch, memory="10MiB", optimizer=torch.optim.AdamW)
    assert 1 < found.micro_batch_size < 16
    assert found.peak(found.micro_batch_size) == found.predicted_peak <= 10 * 2**20
    assert found.peak(found.micro_batch_size + 1) > 10 * 2**20
    assert found.num_micro_batches == -(-16 // found.micro_batch_size)
    assert found.curve[found.micro_batch_size] == found.predicted_peak


def test_the_parts_are_those_of_the_model():
    model, loss_fn, batch = small_gpt()
    found = plan(model, loss_fn, batch, memory="10MiB", optimizer=torch.optim.AdamW)
    own = sum(parameter.nbytes for parameter in model.parameters())
    assert found.parts["parameters"] == found.parts["gradients"] == own
    assert found.parts["optimizer"] == pytest.approx(2 * own, rel=0.001)
    more = found.peak(found.micro_batch_size + 1) - found.predicted_peak
    assert found.parts["activations_per_row"] == pytest.approx(more, rel=0.01)
    assert plan(model, loss_fn, batch, memory=AMPLE).parts["gradients"] == own, "in one piece too"


def test_a_budget_too_small_for_one_row_names_what_would_do():
    model, loss_fn, batch = small_gpt()
    with pytest.raises(BudgetError, match="is too little: a step needs") as error:
        plan(model, loss_fn, batch, memory="1MiB")
    assert plan(model, loss_fn, batch, memory=error.value.needed).micro_batch_size == 1


def test_a_model_much_larger_than_the_machine_is_planned_in_seconds():
    with torch.device("meta"):
        model = GPT(8192, 4, 2048, 128_000, heads=64)
        ids = torch.empty(64, 2048, dtype=torch.long)
    found = plan(model, lambda b: model(b).float().mean(), ids, memory="200GiB", optimizer=torch.optim.AdamW)
    assert sum(p.numel() for p in model.parameters()) > 5e9
    assert 1 <= found.micro_batch_size < 64
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_nothing_is_touched():
    model, _, batch = convolutions()
    model[0].weight.grad = gradient = torch.ones_like(model[0].weight)
    model.extra = None

    def noisy(b):
        model.extra = model(b[0])  # such as caches that a forward leaves
        return functional.cross_entropy(functional.dropout(model.extra), b[1])

    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    tables = [table for m in model.modules() for table in (m.__dict__, m._parameters, m._buffers)]
    before = [dict(table) for table in tables]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    groups, state, generator = list(optimizer.param_groups), dict(optimizer.state), torch.get_rng_state()
    plan(model, noisy, batch, memory=AMPLE, optimizer=optimizer)
    assert [dict(table) for table in tables] == before
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert optimizer.param_groups == groups
    assert optimizer.state == state == {}
    assert scheduler.last_epoch == 0
    assert torch.equal(torch.get_rng_state(), generator)
    optimizer.step()


def test_after_a_failure_nothing_is_touched_either():
    model, _, batch = convolutions()
    weight = model[0].weight

    def fails(b):
        model(b[0])
        raise KeyError("of the user's")

    with pytest.raises(KeyError, match="of the user's"):
        plan(model, fails, batch, memory=AMPLE)
    assert model[0].weight is weight
    assert type(weight) is nn.Parameter


def test_an_optimizer_that_has_stepped_is_planned_as_it_is():
    model, loss_fn, batch = small_gpt(rows=4)
    optimizer = torch.optim.AdamW(model.parameters())
    fresh = plan(model, loss_fn, batch, memory=AMPLE, optimizer=optimizer)
    Accumulator(model).step(loss_fn, batch, optimizer)
    steps = [float(state["step"]) for state in optimizer.state.values()]
    again = plan(model, loss_fn, batch, memory=AMPLE, optimizer=[optimizer])
    assert again.predicted_peak == pytest.approx(fresh.predicted_peak, rel=1e-4)
    assert [float(state["step"]) for state in optimizer.state.values()] == steps


def test_without_an_optimizer_the_plan_says_what_it_leaves_out():
    model, loss_fn, batch = small_gpt(rows=4)
    found = plan(model, loss_fn, batch, memory=AMPLE)
    assert found.parts["optimizer"] == 0
    assert "no optimizer was given" in str(found)


def test_parameters_may_be_given_by_themselves():
    model, loss_fn, batch = small_gpt()
    whole = plan(model, loss_fn, batch, memory="10MiB", optimizer=torch.optim.AdamW, in_place=False)
    loose = plan(model.parameters(), loss_fn, batch, memory="10MiB", optimizer=torch.optim.AdamW, in_place=False)
    assert loose.micro_batch_size == whole.micro_batch_size
    assert loose.predicted_peak == pytest.approx(whole.predicted_peak, rel=0.001)
    assert all(type(parameter) is nn.Parameter and parameter.grad is None for parameter in model.parameters())


def test_several_terms_and_values_that_are_logged():
    model, loss_fn, batch = small_gpt()
    logged = []

    def terms(ids):
        loss = loss_fn(ids)
        logged.append(loss.total.item())  # a number that decides nothing
        return {"nll": loss, "size": 0.1 * Mean(model(ids).square().sum(), ids.numel())}

    def counts(ids):
        return {"nll": ids.numel() - len(ids), "size": ids.numel()}

    found = plan(model, terms, batch, memory=AMPLE, counts=counts)
    assert found.predicted_peak > plan(model, loss_fn, batch, memory=AMPLE).predicted_peak
    assert logged


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_batches_of_few_rows(rows):
    model, loss_fn, batch = small_gpt(rows=rows)
    found = plan(model, loss_fn, batch, memory=AMPLE)
    assert found.micro_batch_size == rows
    assert list(found.curve) == list(range(1, rows + 1))


def test_a_program_that_depends_on_the_rows_is_rehearsed_size_by_size():
    def make(rows=16):
        torch.manual_seed(0)
        model = nn.Linear(512, 512)

        def in_chunks(x):
            return Mean(sum(model(chunk).tanh().square().sum() for chunk in x.split(1)), len(x))

        return model, in_chunks, torch.randn(rows, 64, 512)

    found = predicted(make)
    taken = measured(make, 4) + 8 * 64 * 512 * 4  # half of the batch
    assert found.peak(4) == pytest.approx(taken, rel=0.01)
    assert found.parts["activations_per_row"] == pytest.approx(64 * 512 * 4, rel=0.01)


def test_a_program_that_takes_no_more_from_some_rows_on_is_not_followed_along_a_line():
    def make(rows=16):
        torch.manual_seed(0)
        first, second = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 1))

        def again(x):
            return checkpoint(second, x, use_reentrant=False).square().sum()

        def in_chunks(x):
            return Mean(sum(again(chunk) for chunk in first(x).tanh().split(4)), len(x))

        return nn.ModuleList([first, second]), in_chunks, torch.randn(rows, 64, 64)

    found = predicted(make, torch.optim.SGD)
    assert found.peak(8) == pytest.approx(measured(make, 8, torch.optim.SGD), rel=0.01)
    assert found.peak(8) < 1.1 * found.peak(4)
    model, loss_fn, batch = make()
    assert plan(model, loss_fn, batch, memory=found.peak(8)).micro_batch_size >= 8


def test_what_needs_values_is_refused_with_the_way_out():
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    weight = model.weight
    for loss_fn in (
        lambda b: model(b[b[:, 0] > 0]).mean(),
        lambda b: model(b).mean() if (b > 0).any() else model(b).sum(),
        lambda b: model(b).mean() * int(b.long().sum()),
    ):
        with pytest.raises(PlanError, match=r"planning has no values, and the loss function or the optimizer needs"):
            plan(model, loss_fn, x, memory=AMPLE)
        assert model.weight is weight


def simple():
    model = nn.Linear(4, 4)
    return model, lambda b: model(b).mean(), torch.randn(8, 4)


def test_a_window_has_no_size_to_find():
    model, loss_fn, x = simple()
    with pytest.raises(BatchError, match="a Window is cut already"):
        plan(model, loss_fn, Window([x]), memory=AMPLE)


@pytest.mark.parametrize("option", ["micro_batch_size", "num_micro_batches"])
def test_sizes_are_for_plan_to_find(option):
    with pytest.raises(OptionError, match=f"{option} is what plan finds: leave it out"):
        plan(*simple(), memory=AMPLE, **{option: 4})


def test_optimizers_that_cannot_be_meant():
    model, loss_fn, x = simple()
    with pytest.raises(OptionTypeError, match="optimizer must be a torch optimizer, a sequence of them, or a function"):
        plan(model, loss_fn, x, memory=AMPLE, optimizer="adamw")
    with pytest.raises(OptionError, match="evaluates the loss several times"):
        plan(model, loss_fn, x, memory=AMPLE, optimizer=torch.optim.LBFGS)
    with pytest.raises(OptionError, match=r"the optimizer \(SGD\) holds none of the model's parameters"):
        plan(model, loss_fn, x, memory=AMPLE, optimizer=torch.optim.SGD(nn.Linear(4, 4).parameters()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_models_that_cannot_be_followed():
    _, loss_fn, x = simple()
    with pytest.raises(PlanError, match="cannot be followed: plan the module that it was made from"):
        plan(torch.jit.trace(nn.Linear(4, 4), x), loss_fn, x, memory=AMPLE)
    split = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).to("cpu")])
    split[1].weight = nn.Parameter(torch.empty(4, 4).to_sparse())
    with pytest.raises(PlanError, match="only plain dense tensors can"):
        plan(split, loss_fn, x, memory=AMPLE)


def test_frozen_layers_and_networks_besides_the_model():
    model, other, x = nn.Linear(64, 64), nn.Linear(64, 64), torch.randn(8, 64)
    other.weight.grad = before = torch.ones(64, 64)
    model.bias.requires_grad_(False)
    found = plan(model, lambda b: other(model(b)).square().mean(), x, memory=AMPLE, optimizer=torch.optim.AdamW)
    assert found.parts["optimizer"] == pytest.approx(2 * model.weight.nbytes, abs=8)
    assert other.weight.grad is before
    assert torch.equal(before, torch.ones(64, 64))
    assert other.bias.grad is None
