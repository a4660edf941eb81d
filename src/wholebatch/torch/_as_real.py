"""What stand-ins do otherwise than real tensors, or not at all, done as those would do it."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

_read, _grouped_mm, _add = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten.add.Tensor,
)


def returned_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation returns."""
    if func is _grouped_mm and args[0].dtype != torch.bfloat16:  # the host computes in others too
        return _grouped_product(*args)
    try:
        return func(*args, **kwargs)
    except DataDependentOutputException:
        if func is not _read or not args[0].is_floating_point():
            raise
        return 1.0  # a number that is logged or scales another; integers may become sizes


def adds_in_place(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether autograd adds two gradients of one tensor in the memory of the first.

    It does where nobody else holds that one, and it is no stand-in. The other was just made, so that it shows what
    holds both here. https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/input_buffer.cpp
    """
    in_backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
    if not in_backward or func is not _add or not all(isinstance(arg, Tensor) for arg in args[:2]):
        return False
    one, other = args[:2]
    holders = torch._C._storage_Use_Count(one.untyped_storage()._cdata)  # a tensor, and what asks
    return bool(one.shape == other.shape and holders <= 2 and one._use_count() <= other._use_count())


def _grouped_product(a: Tensor, b: Tensor, offsets: Tensor, *_: Any) -> Tensor:
    """One product for each expert: of some rows, of some columns that are summed over, or of a matrix of its own."""
    groups = a.shape[:-2] if b.dim() == 3 else offsets.shape if a.dim() == 2 else ()
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))
