"""Train a small network on several devices, with a batch larger than what they hold at once.

In one process, on 8 devices that XLA makes of this machine's cores:

    python examples/jax_data_parallel.py

In two processes with 4 of them each; on a cluster, one such line per process:

    python examples/jax_data_parallel.py --devices 4 --coordinator localhost:12345 --processes 2 --process 0 &
    python examples/jax_data_parallel.py --devices 4 --coordinator localhost:12345 --processes 2 --process 1

The losses are the same: rows are shared by the same number of devices, wherever they are. On GPUs or TPUs theirs are
used, whatever `--devices` says.
"""

import argparse

import jax
import numpy as np
import optax
from jax import Array
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from wholebatch import Mean
from wholebatch.jax import collectives, value_and_grad

WIDTH, HIDDEN = 16, 128

Params = dict[str, Array]
Batch = tuple[Array, Array, Array]


def loss_fn(params: Params, x: Array, y: Array, known: Array) -> Mean:
    """Not every row has a label, so the mean is over those that do, wherever they are."""
    predicted = jnp.tanh(x @ params["in"]) @ params["out"]
    return Mean.of((predicted - y) ** 2, where=known)


def make_batch(step: int, batch_size: int, rows: slice) -> tuple[np.ndarray, ...]:
    """These rows of a step's batch; a real loader would read no others."""
    random = np.random.default_rng(step)
    x = random.normal(size=(batch_size, WIDTH)).astype(np.float32)
    known = random.random(batch_size) < np.linspace(0, 1, batch_size)
    return x[rows], np.sin(x[rows, :3].sum(1)), known[rows]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinator", help="host:port of the first process, where there are several")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0, help="the number of this one, from 0")
    parser.add_argument("--devices", type=int, default=8, help="devices to make of the CPU, in each process")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=512, help="rows of a step, on all devices together")
    parser.add_argument("--micro-batch-size", type=int, default=64, help="how many of them are in memory at a time")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    jax.config.update("jax_num_cpu_devices", options.devices)  # means nothing to GPUs and TPUs
    if options.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    jax.set_mesh(mesh)
    optimizer = optax.adam(1e-2)

    def train_step(params: Params, state: optax.OptState, *batch: Array) -> tuple[Params, optax.OptState, Array]:
        gradient = value_and_grad(loss_fn, micro_batch_size=options.micro_batch_size, data_axis="data")
        loss, grads = gradient(params, *batch)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    random = np.random.default_rng(0)
    params = {
        "in": (random.normal(size=(WIDTH, HIDDEN)) / 4).astype(np.float32),
        "out": (random.normal(size=HIDDEN) / 12).astype(np.float32),
    }
    params, state = jax.device_put((params, optimizer.init(params)), NamedSharding(mesh, PartitionSpec()))
    share = options.batch_size // options.processes
    mine = slice(options.process * share, (options.process + 1) * share)

    def read(step: int) -> Batch:
        by_row = NamedSharding(mesh, PartitionSpec("data"))
        x, y, known = (
            jax.make_array_from_process_local_data(by_row, rows) for rows in make_batch(step, options.batch_size, mine)
        )
        return x, y, known

    program = jax.jit(train_step, donate_argnums=(0, 1)).lower(params, state, *read(0)).compile()
    if options.process == 0:
        found = collectives(program)
        print(f"{jax.device_count()} devices in {jax.process_count()} processes")
        print(f"sent in a step: {dict(found.outside)}; for each micro-batch: {dict(found.inside)}")
    for step in range(options.steps):
        params, state, loss = program(params, state, *read(step))
        if options.process == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:3d}   loss {loss:.4f}")


if __name__ == "__main__":
    main()
