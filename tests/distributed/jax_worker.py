"""One of several processes that share a batch; the first writes down what came out.

python jax_worker.py coordinator processes process file
"""

import sys

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from wholebatch import Mean
from wholebatch.jax import collectives, value_and_grad

DEVICES, ROWS = 2, 24
"""Devices of a process, and rows of all."""


def make_problem():
    random = np.random.default_rng(0)
    params = {"w": random.normal(size=(3, 4)), "v": random.normal(size=4)}
    mask = random.random((ROWS, 5)) < np.linspace(0, 1, ROWS)[:, None] ** 2  # few tokens in the first process
    mask[: ROWS // 4] = False  # and none on its first device
    return params, (random.normal(size=(ROWS, 5, 3)), random.normal(size=(ROWS, 5)), mask)


def losses(params, x, y):
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def loss_fn(params, x, y, mask):
    per_token = losses(params, x, y)
    return {"token": Mean.of(per_token, where=mask), "row": 0.1 * per_token.mean()}, per_token.mean(1)


def main(coordinator, processes, process, file):
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, processes, process, initialization_timeout=30)
    mesh = jax.make_mesh((processes * DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    params, batch = make_problem()
    share = ROWS // processes
    mine = slice(process * share, (process + 1) * share)
    by_row = NamedSharding(mesh, PartitionSpec("data"))
    with jax.set_mesh(mesh):
        args = params, *(jax.make_array_from_process_local_data(by_row, rows[mine]) for rows in batch)
        step = jax.jit(value_and_grad(loss_fn, has_aux=True, data_axis="data", micro_batch_size=16))
        program = step.lower(*args).compile()
        (loss, by_row), grads = program(*args)
        found = collectives(program)
        mine_alone = jax.value_and_grad(lambda p: loss_fn(p, *(rows[mine] for rows in batch))[0]["token"].value)(params)
    np.savez(
        file,
        loss=loss,
        **grads,
        mean_of_means=mine_alone[1]["w"],
        rows=np.concatenate([shard.data for shard in by_row.addressable_shards]),
        inside=found.inside.total(),
        outside=[found.outside["all-reduce"], found.outside.total()],
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
