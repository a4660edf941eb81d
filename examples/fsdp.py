"""Train with fully_shard (FSDP2): every process holds a part of each parameter.

    torchrun --nproc-per-node 2 examples/fsdp.py [--sync every]

Runs on GPUs where there are as many as processes, else on the CPU.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from wholebatch import Mean
from wholebatch.torch import Accumulator

ROWS, LENGTH, BYTES, WIDTH = 16, 32, 32, 64


def set_up() -> torch.device:
    """What torchrun tells each process, in the environment."""
    local_rank, on_host = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < on_host:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)  # messages between hosts need not wait for a GPU
    return device


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Sequences in which each number follows from the one before; of unequal lengths, so of unequal counts."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    ids = (torch.randint(BYTES, (ROWS, 1), generator=generator) + 3 * torch.arange(LENGTH + 1)) % BYTES
    lengths = torch.randint(4, LENGTH + 1, (ROWS, 1), generator=generator)
    return ids, torch.arange(LENGTH) < lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--sync", choices=["once", "every"], default="once")
    options = parser.parse_args()

    device = set_up()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(BYTES, WIDTH), *layers, nn.Linear(WIDTH, BYTES), nn.LogSoftmax(-1)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Mean:
        ids, counts = piece
        losses = nn.functional.nll_loss(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
        return Mean.of(losses, where=counts)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accumulator = Accumulator(model, micro_batch_size=options.micro_batch_size, sync=options.sync)
    for step in range(1, options.steps + 1):
        result = accumulator.step(loss_fn, make_batch(step), optimizer, max_norm=1.0)
        if dist.get_rank() == 0 and (step % 10 == 0 or step == 1):
            print(f"step {step:3d}   loss {result.loss:.3f} over {result.count} tokens in {result.rows} rows")
    dist.barrier()  # a thread of gloo that still holds a tensor when Python ends would abort the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
