"""One gradient of a batch sharded over 8 devices, in 8 pieces: wholebatch beside what else there is in JAX.

    python benchmarks/mesh.py [--rounds N] [--json FILE]

The devices are those that XLA makes of this machine's cores, so their wire is its memory: what is compared is how often
gradients cross it and whether the batch does. Contenders take turns; all must end with the same weights.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import jax
import numpy as np
import optax
from jax import Array, lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from wholebatch.jax import collectives, value_and_grad

ROWS, PIECES, WIDTH, HIDDEN = 512, 8, 256, 1024
STEPS = 5
"""Per contender and round, each on another batch."""

Params = dict[str, Array]
Gradient = Callable[[Params, Array, Array], tuple[Array, Params]]


def loss_fn(params: Params, x: Array, y: Array) -> Array:
    hidden = jax.nn.gelu(x @ params["in"] + params["b"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


def by_optax() -> Gradient:
    """As its documentation says, with the mean as accumulator."""
    mean = optax.microbatching.AccumulationType.MEAN
    return optax.microbatching.microbatch(
        jax.value_and_grad(loss_fn), argnums=(1, 2), microbatch_size=ROWS // PIECES, accumulator=mean
    )


def by_scan(params: Params, x: Array, y: Array) -> tuple[Array, Params]:
    """The loop that most scripts have: reshape, scan, divide."""

    def add(total: Any, piece: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, *piece)), None

    zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
    pieces = jax.tree.map(lambda rows: rows.reshape(PIECES, -1, *rows.shape[1:]), (x, y))
    total, _ = lax.scan(add, zeros, pieces)
    return jax.tree.map(lambda leaf: leaf / PIECES, total)


CONTENDERS: dict[str, Gradient] = {
    "wholebatch": value_and_grad(loss_fn, num_micro_batches=PIECES, data_axis="data"),
    "wholebatch without data_axis": value_and_grad(loss_fn, num_micro_batches=PIECES),
    "optax.microbatching": by_optax(),
    "reshape and scan": by_scan,
    "unsplit batch": jax.value_and_grad(loss_fn),
}


def make_step(gradient: Gradient) -> Callable[..., Params]:
    def step(params: Params, x: Array, y: Array) -> Params:
        _, grads = gradient(params, x, y)
        return jax.tree.map(lambda weight, grad: weight - 0.1 * grad, params, grads)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="write the result to this file")
    options = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", 8)
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        start = jax.device_put(
            {"in": normal(WIDTH, HIDDEN) / 16, "b": normal(HIDDEN), "out": normal(HIDDEN, WIDTH) / 32}, PartitionSpec()
        )
        batches = [
            jax.device_put((normal(ROWS, WIDTH), normal(ROWS, WIDTH)), PartitionSpec("data")) for _ in range(STEPS)
        ]
        programs = {
            name: jax.jit(make_step(gradient)).lower(start, *batches[0]).compile()
            for name, gradient in CONTENDERS.items()
        }

        def run(name: str) -> tuple[float, Params]:
            params, before = start, time.perf_counter()
            for batch in batches:
                params = programs[name](params, *batch)
            jax.block_until_ready(params)
            return time.perf_counter() - before, params

        weights = {name: run(name)[1] for name in programs}
        for name in programs:
            for leaf in start:
                assert not np.allclose(weights[name][leaf], start[leaf], atol=1e-5), "the steps moved the weights"
                np.testing.assert_allclose(weights[name][leaf], weights["unsplit batch"][leaf], atol=1e-6)
        times: dict[str, list[float]] = {name: [] for name in programs}
        for name in list(programs) * options.rounds:
            times[name].append(run(name)[0])

    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "jax": jax.__version__,
        "optax": optax.__version__,
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "devices": jax.device_count(),
        "rounds": options.rounds,
        "contenders": {name: described(name, programs[name], times) for name in programs},
    }
    for name, figures in result["contenders"].items():
        print(f"{name:30s} {figures['over optax.microbatching']:.2f} of optax.microbatching   {figures['collectives']}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=2)
            file.write("\n")


def described(name: str, program: Any, times: dict[str, list[float]]) -> dict[str, Any]:
    """A contender's median over that of optax, round by round's spread, and what it sends in a step."""
    ratios = [one / other for one, other in zip(times[name], times["optax.microbatching"], strict=True)]
    found = collectives(program)
    return {
        "over optax.microbatching": round(
            statistics.median(times[name]) / statistics.median(times["optax.microbatching"]), 3
        ),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "ms per step": round(1000 * statistics.median(times[name]) / STEPS, 2),
        "collectives": {"in the loop": dict(found.inside), "once": dict(found.outside)},
    }


if __name__ == "__main__":
    main()
