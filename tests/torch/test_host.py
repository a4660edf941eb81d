"""Nothing in the loop waits for the device; one read ends the batch."""

import pytest
import torch
from models import make_data, make_loss, make_model
from test_tokens import Tiny, make_tokens
from torch.utils._python_dispatch import TorchDispatchMode

from wholebatch import Mean, Sum
from wholebatch.torch import Accumulator, token_mean
from wholebatch.torch import _host as host
from wholebatch.torch._host import read_once

WAITING = {
    torch.ops.aten._local_scalar_dense.default,  # .item(), float(), int()
    torch.ops.aten.is_nonzero.default,  # bool()
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
}


class CountWaits(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.waits += func in WAITING
        return func(*args, **(kwargs or {}))


def test_the_counter_counts():
    with CountWaits() as counter:
        bool(torch.ones(()))
        torch.ones(()).item()
    assert counter.waits == 2


READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")


@pytest.mark.parametrize("form", ["scalar", "mean", "terms", "metrics"])
def test_no_method_that_reads_is_called_between_the_first_piece_and_the_last(form, monkeypatch):
    """The dispatcher does not see all of them, and on the host they cost nothing; on a device they would."""
    model, data = make_model(), make_data()
    loss_fn, called, reads = CASES[form](model), [], []

    def watched(name, method):
        def read(tensor, *args, **kwargs):
            if 1 <= len(called) < 10:
                reads.append(name)
            return method(tensor, *args, **kwargs)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name)))

    def counted(piece):
        loss = loss_fn(piece)
        called.append(1)
        return loss

    Accumulator(model, num_micro_batches=10).backward(counted, data)
    assert len(called) == 10
    assert reads == []


CASES = {
    "scalar": lambda model: make_loss(model),
    "mean": lambda model: lambda b: Mean(make_loss(model)(b), (b[1] >= 0).sum()),
    "terms": lambda model: lambda b: {"a": Mean(make_loss(model)(b), (b[1] > 0).sum()), "b": Sum(make_loss(model)(b))},
    "metrics": lambda model: lambda b: (make_loss(model)(b), {"m": Mean.of(b[0], where=b[0] > 0)}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("policy", ["raise", "skip", "keep"])
def test_no_loss_form_waits(case, policy):
    model, data = make_model(), make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, micro_batch_size=1, on_nonfinite=policy)
    with CountWaits() as counter:
        accumulator.backward(case(model), data)
        accumulator.step(case(model), data, optimizer, max_norm=1.0)
    assert counter.waits == 0


def test_token_means_and_counts_do_not_wait():
    model, batch = Tiny(), make_tokens()
    loss_fn = lambda b: {"nll": token_mean(model(b["input_ids"]), b["labels"])}  # noqa: E731
    counts = lambda b: {"nll": (b["labels"][:, 1:] != -100).sum()}  # noqa: E731
    with CountWaits() as counter:
        Accumulator(model, micro_batch_size=1).backward(loss_fn, batch, counts=counts)
    assert counter.waits == 0


@pytest.mark.parametrize("pieces", [1, 2, 10])
def test_the_host_reads_once_per_batch(pieces, monkeypatch):
    reads = []
    monkeypatch.setattr("wholebatch.torch._host.read_once", lambda v: reads.append(len(v)) or read_once(v))
    model, data = make_model(), make_data()
    Accumulator(model, num_micro_batches=pieces).step(
        CASES["terms"](model), data, torch.optim.SGD(model.parameters(), 0.1), max_norm=1.0
    )
    assert len(reads) == 1


def test_values_survive_the_transfer_as_bytes(monkeypatch):
    values = [
        torch.tensor(True),
        torch.tensor([2**53 + 1, -5]),
        torch.tensor([0.1], dtype=torch.float64),
        torch.tensor([float("nan"), 1.5], dtype=torch.float32),
        torch.tensor(3, dtype=torch.uint8),
    ]
    monkeypatch.setattr(host, "_is_on_host", lambda value: False)
    for value, arrived in zip(values, read_once(values), strict=True):
        assert arrived.dtype == value.dtype
        assert torch.equal(arrived.nan_to_num(-1), value.reshape(-1).nan_to_num(-1))
