"""Reduce: the local sums of every process become the global batch's, crossing the wire once.

    Σ_ranks sums = world · (Σ_ranks sums / world)

The bracket is what a DDP module's reducer computes, with its own buckets and communication hook. One backward, of a
loss that depends on every parameter and adds nothing to any, tells it that `.grad` is ready.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class _Ready(torch.autograd.Function):
    """Depends on all parameters; its backward has nothing to add to any of them."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        return torch.zeros(())  # on the host, so that the reducer runs on the caller's thread and stream

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (None,) * len(ctx.needs_input_grad)


def announce(ddp: DistributedDataParallel, parameters: list[Tensor]) -> Tensor:
    """A loss whose backward, alone or with others, makes DDP reduce what the parameters' `.grad` hold at its end."""
    with torch.enable_grad():
        ready: Tensor = _Ready.apply(*parameters)  # type: ignore[no-untyped-call]
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([ready])
    return ready


def reduce_gradients(ddp: DistributedDataParallel, parameters: list[Tensor], expect_sparse: list[bool]) -> None:
    """Replace every `.grad` by its mean over the processes."""
    for parameter, sparse in zip(parameters, expect_sparse, strict=True):
        if parameter.grad is None:
            parameter.grad = _sparse_zero(parameter) if sparse else torch.zeros_like(parameter)
    announce(ddp, parameters).backward()
    ddp._check_reducer_finalized()


def _sparse_zero(like: Tensor) -> Tensor:
    """With one entry, since gloo mixes up messages where a process has none."""
    indices = torch.zeros(1, 1, dtype=torch.long, device=like.device)
    return torch.sparse_coo_tensor(indices, torch.zeros_like(like[:1]), like.shape, check_invariants=False)
