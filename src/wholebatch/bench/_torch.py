"""Contenders in torch, ready to take turns."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from ._torch_loops import LOOPS
from ._torch_problems import PROBLEMS, Batch


class Contender:
    """One model on its way, from the same weights as all others.

    Args:
        name: whose loop.
        problem: what is trained.
        size: rows of a piece.
        checked: with plain gradient descent at rate 1, so that weights show the gradient itself.
    """

    facts: Mapping[str, float] = {}

    def __init__(self, name: str, problem: Any, size: int, *, checked: bool = False) -> None:
        torch.manual_seed(0)
        self._model = problem.model()
        weights = self._model.parameters()
        optimizer = torch.optim.SGD(weights, lr=1.0) if checked else torch.optim.AdamW(weights, lr=1e-3, fused=True)
        self.step = LOOPS[name](problem, self._model, optimizer, size)

    def weights(self) -> list[Any]:
        """As arrays of their own."""
        return [weight.detach().numpy().copy() for weight in self._model.parameters()]


class Bench:
    """A problem in torch.

    Args:
        problem: its name.
        options: the problem's.
        size: rows of a piece.
        threads: how many.
        double: whether all is float64.
    """

    def __init__(self, problem: str, options: Mapping[str, int], size: int, threads: int, *, double: bool) -> None:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float64 if double else torch.float32)
        self.problem: Any = PROBLEMS[problem](**options)
        self._size, self._double = size, double
        if double:
            self.problem.steps = True
        self.rows: int = self.problem.rows

    def contender(self, name: str) -> Contender:
        return Contender(name, self.problem, self._size, checked=self._double)

    def batches(self, count: int) -> list[Batch]:
        torch.manual_seed(1)
        return [self.problem.batch() for _ in range(count)]

    def work(self) -> dict[str, float]:
        """Floating-point operations of a step's gradient, and bytes that AdamW reads and writes."""
        model = self.problem.model()
        (batch,) = self.batches(1)
        with FlopCounterMode(display=False) as counter:
            self.problem.by_hand(model, batch, batch, 1).backward()
        weights = sum(weight.numel() for weight in model.parameters())
        return {"operations": counter.get_total_flops(), "bytes": 7 * 4 * weights * self.problem.steps}

    def limits(self) -> dict[str, float]:
        """What the machine does at best: operations of a matrix product and bytes of a copy, per second."""
        a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
        source, target = torch.randn(2**25), torch.empty(2**25)
        product = _best(lambda: a @ b)
        copy = _best(lambda: target.copy_(source))
        return {"operations": 2 * 1024**3 / product, "bytes": 2 * 4 * 2**25 / copy}


def _best(work: Any) -> float:
    times = []
    for _ in range(10):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return float(np.min(times))
