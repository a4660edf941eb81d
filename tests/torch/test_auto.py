"""micro_batch_size="auto": the size is found, halved where memory runs out, and the batch stays the same."""

import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from models import make_data, make_loss, make_model, take_gradients, whole_gradients
from to_plan import small_gpt
from torch import nn

from reference import assert_exact
from wholebatch import BudgetError, Mean, OptionError, OptionTypeError
from wholebatch.torch import Accumulator, Window, _auto, backward, plan, train

MESSAGES = [
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
    "std::bad_alloc",
    "could not create a primitive",
]
ERRORS = [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), *map(RuntimeError, MESSAGES)]


class Limited:
    """A loss function for which more than some rows do not fit."""

    def __init__(self, model, fits, error=ERRORS[0]):
        self.loss_fn, self.fits, self.error, self.rows = make_loss(model), fits, error, []

    def __call__(self, piece):
        self.rows.append(len(piece[0]))
        loss = self.loss_fn(piece)
        if len(piece[0]) > self.fits:
            raise self.error
        return loss


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__} {error}"[:40])
def test_where_memory_runs_out_the_batch_runs_again_with_half_the_piece(error):
    model, data = make_model(), make_data()
    whole = whole_gradients(model, lambda: make_loss(model)(data))
    limited = Limited(model, 3, error)
    result = backward(model, limited, data, micro_batch_size="auto")
    assert limited.rows == [10, 5, 2, 2, 2, 2, 2]
    assert (result.num_micro_batches, result.rows) == (5, 10)
    assert_exact(take_gradients(model), whole)


def test_a_gradient_that_was_there_is_added_to_once():
    model, data = make_model(), make_data()
    make_loss(model)(data).backward()
    once = {name: 2 * gradient for name, gradient in take_gradients(model).items()}
    make_loss(model)(data).backward()
    backward(model, Limited(model, 3), data, micro_batch_size="auto")
    assert_exact(take_gradients(model), once)


def test_the_size_that_worked_is_remembered():
    model, data = make_model(), make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator, limited = Accumulator(model, micro_batch_size="auto"), Limited(model, 5)
    accumulator.step(limited, data, optimizer)
    assert accumulator.micro_batch_size == 5
    limited.rows.clear()
    accumulator.step(limited, data, optimizer)
    assert limited.rows == [5, 5]


def test_a_size_that_is_known_is_where_auto_begins():
    model, data = make_model(), make_data()
    accumulator, limited = Accumulator(model, memory="1KiB"), Limited(model, 3)  # nothing is planned: none would fit
    accumulator.micro_batch_size = 4
    accumulator.backward(limited, data)
    assert limited.rows == [4, 2, 2, 2, 2, 2]
    assert accumulator.micro_batch_size == 2


def test_a_size_that_was_given_may_be_changed():
    model, data = make_model(), make_data()
    accumulator = Accumulator(model)
    assert accumulator.micro_batch_size is None
    accumulator.micro_batch_size = 3
    assert accumulator.backward(make_loss(model), data).num_micro_batches == 4


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({}, 0, "micro_batch_size must be at least 1, got 0"),
        ({"num_micro_batches": 2}, 3, "both micro_batch_size=3 and num_micro_batches=2"),
        ({"lengths": len, "micro_batch_tokens": 8}, 3, "micro_batch_tokens=8 decides how many rows a piece has"),
    ],
)
def test_a_size_that_cannot_be_set(options, size, message):
    accumulator = Accumulator(make_model(), **options)
    with pytest.raises(OptionError, match=message):
        accumulator.micro_batch_size = size


def test_a_failure_in_a_later_piece_restores_the_batchs_start():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    x, calls = torch.randn(8, 4).double(), []

    def loss_fn(piece):
        calls.append(torch.rand(()))  # as a second run would draw it if the first had left a trace
        if len(calls) == 3:
            raise torch.OutOfMemoryError
        return model(piece).square().mean()

    accumulator = Accumulator(model, micro_batch_size="auto")
    accumulator.micro_batch_size = 2
    accumulator.backward(loss_fn, x)
    assert torch.equal(calls[0], calls[3])
    assert len(calls) == 3 + 8


def test_at_one_row_the_error_says_what_to_do():
    model, data = make_model(), make_data()
    limited = Limited(model, 0)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as error:
        backward(model, limited, data, micro_batch_size="auto")
    assert "not even one row fits: shorter rows, torch.utils.checkpoint" in error.value.__notes__[0]
    assert limited.rows == [10, 5, 2, 1]
    assert take_gradients(model) == {}


def test_other_errors_are_not_tried_again():
    model, data = make_model(), make_data()
    limited = Limited(model, 0, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        backward(model, limited, data, micro_batch_size="auto")
    assert limited.rows == [10]


def test_memory_that_runs_out_in_the_optimizer_is_not_tried_again():
    class Greedy(torch.optim.SGD):
        def step(self):
            raise torch.OutOfMemoryError("in the step")

    model, data = make_model(), make_data()
    limited = Limited(model, 10)
    with pytest.raises(torch.OutOfMemoryError, match="in the step"):
        Accumulator(model, micro_batch_size="auto").step(limited, data, Greedy(model.parameters(), lr=0.1))
    assert limited.rows == [10]


def test_what_the_failed_run_held_is_released_before_the_next():
    model, data = make_model(), make_data()
    held = []

    def loss_fn(piece):
        if held:
            assert held[0]() is None
        else:
            activation = torch.ones(1000)
            held.append(weakref.ref(activation))
            raise torch.OutOfMemoryError
        return make_loss(model)(piece)

    backward(model, loss_fn, data, micro_batch_size="auto")
    assert held


def test_a_window_stays_as_it_is():
    model, (x, y) = make_model(), make_data()
    limited = Limited(model, 3)
    with pytest.raises(torch.OutOfMemoryError):
        backward(model, limited, Window([(x, y)]), micro_batch_size="auto")
    assert limited.rows == [10]


def test_a_budget_finds_the_size_with_the_plan():
    model, loss_fn, batch = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    expected = plan(model, loss_fn, batch, memory="10MiB", optimizer=optimizer)
    accumulator = Accumulator(model, micro_batch_size="auto", memory="10MiB")
    assert accumulator.step(loss_fn, batch, optimizer).num_micro_batches == expected.num_micro_batches > 1
    assert accumulator.step(loss_fn, batch[:3], optimizer).num_micro_batches == -(-3 // expected.micro_batch_size)


@pytest.mark.parametrize(("free", "pieces"), [(10 * 2**20, None), (2**20, 16), (2**40, 1)])
def test_without_a_budget_a_device_says_what_is_free(monkeypatch, free, pieces):
    model, loss_fn, batch = small_gpt()
    monkeypatch.setattr(_auto, "only_device", lambda parameters: torch.device("cuda"))
    monkeypatch.setattr(_auto, "_usable", lambda device: free)
    expected = pieces or plan(model, loss_fn, batch, memory=free).num_micro_batches
    assert backward(model, loss_fn, batch, micro_batch_size="auto").num_micro_batches == expected


def test_what_cannot_be_planned_is_tried_as_a_whole(monkeypatch):
    model, (x, y) = make_model(), make_data()
    monkeypatch.setattr(_auto, "only_device", lambda parameters: torch.device("cuda"))
    monkeypatch.setattr(_auto, "_usable", lambda device: 2**30)
    rows = int(y.max())  # a value
    assert backward(model, lambda b: model(b[0]).mean() * int(b[1].max()) / rows, (x, y), micro_batch_size="auto").rows


def test_a_budget_too_small_changes_nothing():
    model, loss_fn, batch = small_gpt(rows=4)
    with pytest.raises(BudgetError, match="is too little"):
        Accumulator(model, micro_batch_size="auto", memory="1MiB").backward(loss_fn, batch)
    assert take_gradients(model) == {}


def test_training_finds_the_size_too():
    model, loss_fn, batch = small_gpt(rows=8)
    optimizer = torch.optim.AdamW(model.parameters())
    sizes = []

    def noting(ids):
        sizes.append(len(ids))
        return loss_fn(ids)

    train(model, [batch], optimizer, noting, micro_batch_size="auto", memory="10MiB", progress=False)
    assert max(sizes[-2:]) < 8
    assert sum(sizes[-2:]) == 8


def test_terms_with_counts_are_planned_with_them():
    model, data = make_model(), make_data()
    n = lambda b: len(b[0])  # noqa: E731
    loss = lambda b: {name: Mean(model(b[0]).square().sum(), n(b)) for name in "ab"}  # noqa: E731
    counts = lambda b: {"a": n(b), "b": n(b)}  # noqa: E731
    backward(model, loss, data, counts=counts, micro_batch_size="auto", memory="1GiB")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"micro_batch_size": 4, "memory": "8GiB"},
            "both memory='8GiB', which finds a size, and micro_batch_size=4 were",
        ),
        (
            {"micro_batch_size": "auto", "num_micro_batches": 2},
            'both micro_batch_size="auto", which finds a size, and num_',
        ),
        (
            {"micro_batch_tokens": 9, "lengths": len, "memory": 1},
            "both memory=1, which finds a size, and micro_batch_tokens=9",
        ),
    ],
    ids=lambda given: "" if isinstance(given, str) else ", ".join(given),
)
def test_a_size_is_found_or_given(options, text):
    with pytest.raises(OptionError, match=text):
        Accumulator(make_model(), **options)


def test_a_budget_alone_means_auto():
    model, loss_fn, batch = small_gpt(rows=8)
    optimizer = torch.optim.AdamW(model.parameters())
    assert Accumulator(model, memory="10MiB").step(loss_fn, batch, optimizer).num_micro_batches > 1


def test_what_is_not_auto_is_a_size():
    model = make_model()
    with pytest.raises(OptionTypeError, match="micro_batch_size must be a positive integer, got 'automatic'"):
        Accumulator(model, micro_batch_size="automatic")


PROGRAM = """
import torch
from torch import nn
from wholebatch.torch import Accumulator

def start():
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())])
    return model, torch.randn(8192, 256), lambda piece: model(piece).square().mean()

def train(size):
    model, x, loss_fn = start()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    accumulator = Accumulator(model, micro_batch_size=size)
    for _ in range(2):
        result = accumulator.step(loss_fn, x, optimizer)
    return result.num_micro_batches, list(model.parameters())
"""

PRESSED = """
import re, resource, sys
from pathlib import Path

torch.set_num_threads(1)
train(1024)  # what libraries take for themselves once
taken = int(re.search(r"VmSize:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (taken + 60 * 2**20,) * 2)
try:
    train(None)
    fits = True
except RuntimeError:
    fits = False
if not fits:
    torch.save(train("auto"), sys.argv[1])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the address space is read from Linux's /proc")
def test_a_batch_that_cannot_fit_trains_to_the_same_weights_as_with_a_small_size(tmp_path):
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM + PRESSED, str(tmp_path / "weights")]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "weights").exists(), "the batch fits in one piece"
    pieces, weights = torch.load(tmp_path / "weights")
    assert 2 < pieces < 64
    small = {}
    exec(PROGRAM, small)
    for weight, expected in zip(weights, small["train"](512)[1], strict=True):
        assert torch.allclose(weight, expected, rtol=1e-4, atol=1e-6)
