"""The conformance table's view of `wholebatch.torch`."""

from typing import Any

import numpy as np
import torch

from conformance.cases import TRAINED, LossCase, Structure
from wholebatch.torch import Accumulator, Result, Window
from wholebatch.torch._tree import map_tensors

Arrays = dict[str, np.ndarray]


def to_torch(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def make_leaves(params: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(array, requires_grad=name in TRAINED) for name, array in params.items()}


def gradients(leaves: dict[str, torch.Tensor]) -> Arrays:
    return {name: leaf.grad.numpy() for name, leaf in leaves.items() if leaf.grad is not None}


def split(
    case: LossCase, params: Arrays, batch: Arrays, cut: dict[str, int], structure: Structure
) -> tuple[Result, Arrays]:
    """The library's gradient."""
    leaves = make_leaves(params)
    result = Accumulator(leaves.values(), **cut).backward(
        lambda piece: case.split(leaves, structure.unpack(piece), torch),
        structure.pack(to_torch(batch)),
        counts=case.counts and (lambda piece: case.counts(structure.unpack(piece))),
    )
    return result, gradients(leaves)


def windowed(sizes: list[int]) -> Structure:
    """The batch as a window of pieces of these sizes."""

    def pack(batch: dict[str, torch.Tensor]) -> Window:
        parts = {name: tensor.split(sizes) for name, tensor in batch.items()}
        return Window({name: part[i] for name, part in parts.items()} for i in range(len(sizes)))

    return Structure(pack, lambda piece: piece)


def added(case: LossCase, params: Arrays, batch: Arrays, sizes: list[int]) -> tuple[Result, Arrays]:
    """The library's gradient in a loop that runs the pieces itself."""
    leaves = make_leaves(params)
    accumulator = Accumulator(leaves.values())
    for piece in windowed(sizes).pack(to_torch(batch)):
        accumulator.add(case.split(leaves, piece, torch), rows=len(piece["x"]))
    return accumulator.finish(), gradients(leaves)


def whole(objective: Any, params: Arrays, batch: Arrays) -> tuple[float, Arrays]:
    """Plain autograd's gradient of the unsplit batch."""
    leaves = make_leaves(params)
    loss = objective(leaves, to_torch(batch), torch)
    loss.backward()
    return loss.item(), gradients(leaves)


def naive_mean_of_means(objective: Any, params: Arrays, batch: Arrays, sizes: list[int]) -> Arrays:
    """The loop in most scripts: the mean of the pieces' means."""
    return _naive(objective, params, batch, sizes, [1 / len(sizes)] * len(sizes))


def naive_full_count(objective: Any, params: Arrays, batch: Arrays, sizes: list[int]) -> Arrays:
    """Another: every piece divided by the number of pieces of a full window, also in a short last one."""
    return _naive(objective, params, batch, sizes, [1 / (len(sizes) + 1)] * len(sizes))


def _naive(objective: Any, params: Arrays, batch: Arrays, sizes: list[int], shares: list[float]) -> Arrays:
    leaves = make_leaves(params)
    start = 0
    for size, share in zip(sizes, shares, strict=True):
        piece = map_tensors(lambda t: t[start : start + size], to_torch(batch))  # noqa: B023
        (objective(leaves, piece, torch) * share).backward()
        start += size
    return gradients(leaves)
