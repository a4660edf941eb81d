"""Train with DistributedDataParallel: a batch of 64 rows over all processes, a few of them in memory at a time.

    torchrun --nproc-per-node 2 examples/ddp.py

Runs on GPUs where there are as many as processes, else on the CPU. Processes hold different numbers of rows here, on
purpose: the gradient is that of the 64 rows all the same, and the weights are equal on all ranks afterwards.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.torch import Accumulator

BATCH_SIZE = 64


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


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The same batch in every process; a loader would read the rows of this one only."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH_SIZE, 16, generator=generator)
    return x, (x.square().sum(1) > 16).long()


def share_of(batch: tuple[Tensor, Tensor], step: int) -> tuple[Tensor, Tensor]:
    """This process's rows; the first process has more of them in each step, as long as there are others."""
    rank, world = dist.get_rank(), dist.get_world_size()
    more = min(2 * step, BATCH_SIZE // 2) if world > 1 else 0
    starts = [0, *(more + (BATCH_SIZE - more) * (i + 1) // world for i in range(world))]
    return batch[0][starts[rank] : starts[rank + 1]], batch[1][starts[rank] : starts[rank + 1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    options = parser.parse_args()

    device = set_up()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 2)).to(device)
    ddp = DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device.index])

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        x, y = piece
        return nn.functional.cross_entropy(ddp(x), y)

    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    accumulator = Accumulator(ddp, micro_batch_size=options.micro_batch_size)
    for step in range(1, options.steps + 1):
        result = accumulator.step(loss_fn, share_of(batch_of(step), step), optimizer, max_norm=1.0)
        if dist.get_rank() == 0 and (step % 10 == 0 or step == 1):
            print(
                f"step {step:3d}   loss {result.loss:.3f} over {result.rows} rows in {dist.get_world_size()} processes"
            )

    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    every = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(every, weights)
    if dist.get_rank() == 0:
        print(f"weights are equal in all processes: {'yes' if all(w.equal(weights) for w in every) else 'NO'}")
    dist.barrier()  # a thread of gloo that still holds a tensor when Python ends would abort the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
