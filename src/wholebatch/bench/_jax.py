"""Contenders in JAX, ready to take turns."""

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp

from ._case import MULTI_STEPS, MULTI_STEPS_DONATED
from ._jax_loops import GRADIENTS, step_of
from ._jax_problems import PROBLEMS, Batch

MAX_NORM = 1.0


class Contender:
    """One model on its way, from the same weights as all others; compiled.

    Args:
        name: whose step.
        problem: what is trained.
        size: rows of a piece.
        batch: any, for its shapes.
        checked: with plain gradient descent at rate 1, so that weights show the gradient itself.
    """

    def __init__(self, name: str, problem: Any, size: int, batch: Batch, *, checked: bool = False) -> None:
        self._params = problem.params()
        optimizer: Any = optax.chain(
            optax.clip_by_global_norm(MAX_NORM), optax.sgd(1.0) if checked else optax.adamw(1e-3)
        )
        self._size = problem.rows
        if name in (MULTI_STEPS, MULTI_STEPS_DONATED):
            self._size = size
            optimizer = optax.MultiSteps(optimizer, every_k_schedule=problem.rows // size)
        self._state = optimizer.init(self._params)
        jitted = step_of(GRADIENTS[name](problem.loss, size), optimizer, donated=name != MULTI_STEPS)
        start = time.perf_counter()
        self._compiled = jitted.lower(self._params, self._state, *self._cut(batch)[0]).compile()
        self.facts = {
            "compile_seconds": time.perf_counter() - start,
            "temporary_bytes": self._compiled.memory_analysis().temp_size_in_bytes,
        }

    def step(self, batch: Batch) -> None:
        """One optimizer step, until it is done."""
        for ids, labels in self._cut(batch):
            self._params, self._state, _ = self._compiled(self._params, self._state, ids, labels)
        jax.block_until_ready(self._params)  # type: ignore[no-untyped-call]

    def weights(self) -> list[Any]:
        """As arrays of their own."""
        return [np.array(leaf) for leaf in jax.tree.leaves(self._params)]

    def _cut(self, batch: Batch) -> list[Batch]:
        ids, labels = batch
        places = range(0, len(ids), self._size)
        return [(ids[i : i + self._size], labels[i : i + self._size]) for i in places]


class Bench:
    """A problem in JAX.

    Args:
        problem: its name.
        options: the problem's.
        size: rows of a piece.
        threads: JAX takes those that the process may run on.
        double: whether all is float64.
    """

    def __init__(self, problem: str, options: Mapping[str, int], size: int, threads: int, *, double: bool) -> None:
        jax.config.update("jax_enable_x64", double)  # type: ignore[no-untyped-call]
        self.problem = PROBLEMS[problem](**options)
        self._size, self._double = size, double
        self.rows = self.problem.rows

    def contender(self, name: str) -> Contender:
        return Contender(name, self.problem, self._size, self.batches(1)[0], checked=self._double)

    def batches(self, count: int) -> list[Batch]:
        random = np.random.default_rng(1)
        return [self.problem.batch(random) for _ in range(count)]

    def work(self) -> dict[str, float]:
        """Floating-point operations of a step's gradient, and bytes that AdamW reads and writes."""
        params = self.problem.params()
        gradient = jax.jit(jax.grad(self.problem.loss)).lower(params, *self.batches(1)[0]).compile()
        costs: Any = gradient.cost_analysis()
        weights = sum(leaf.size for leaf in jax.tree.leaves(params))
        return {"operations": float(costs["flops"]), "bytes": 7 * 4 * weights}

    def limits(self) -> dict[str, float]:
        """What the machine does at best: operations of a matrix product and bytes of a copy, per second."""
        a = jnp.asarray(np.random.default_rng(0).normal(size=(1024, 1024)), jnp.float32)
        source = jnp.ones(2**25, jnp.float32)
        product = _best(jax.jit(jnp.matmul), a, a)
        copy = _best(jax.jit(jnp.negative), source)
        return {"operations": 2 * 1024**3 / product, "bytes": 2 * 4 * 2**25 / copy}


def _best(work: Any, *args: Any) -> float:
    times = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(work(*args))  # type: ignore[no-untyped-call]
        times.append(time.perf_counter() - start)
    return float(np.min(times))
