"""Replicas: every process holds the whole model (DDP) and some of the rows.

Pieces are local: nothing crosses the wire in their forwards and backwards. What DDP would exchange in its first forward
(buffers, once the order of its buckets) is exchanged before the first piece, by every process, since one without rows
calls no forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .._errors import BatchError, OptionError
from ._loss import Number
from ._peers import Peers
from ._reduce import reduce_gradients
from ._sums import GradientSums, set_grad_dtype

_NOT_CALLED: Any = 1
"""Stands for True in `require_forward_param_sync` until the module is called outside a batch, which puts True there.

Such a call makes the reducer expect a backward; if none came, it would take a piece's for it.
"""


class Replicas(Peers):
    """The processes of DDP modules.

    Args:
        modules: the DDP modules of the model.
    """

    def __init__(self, modules: list[DistributedDataParallel]) -> None:
        self._modules = modules
        for module in modules:
            _refuse(module)
        super().__init__(modules[0].process_group, modules[0].device)
        ranks = dist.get_process_group_ranks(self.group)
        if any(dist.get_process_group_ranks(module.process_group) != ranks for module in modules):
            raise OptionError("the model's DDP modules belong to process groups of different ranks: give each its own")
        self._shared = [module._build_params_for_reducer() for module in modules]

    @property
    def clean(self) -> bool:
        return all(module.require_forward_param_sync is _NOT_CALLED for module in self._modules)

    def begin(self, clean: bool) -> None:
        if not clean:
            self.reset()
        for module in self._modules:
            module.reducer._rebuild_buckets()
            if module._check_sync_bufs_pre_fwd():
                module._sync_buffers()

    def reset(self) -> None:
        for module in self._modules:
            module.reducer._reset_state()

    @contextmanager
    def apart(self) -> Iterator[None]:
        before = [(module.require_backward_grad_sync, module.require_forward_param_sync) for module in self._modules]
        try:
            for module in self._modules:
                module.require_backward_grad_sync = module.require_forward_param_sync = False
            yield
        finally:
            for module, (gradients, buffers) in zip(self._modules, before, strict=True):
                module.require_backward_grad_sync, module.require_forward_param_sync = gradients, buffers

    def check_apart(self) -> None:
        if any(module.require_forward_param_sync for module in self._modules):  # a forward in no_sync clears it
            raise BatchError(
                "the DDP module was called where it synchronises each backward: compute the loss that you give to .add "
                "within `with model.no_sync():`, the batch is synchronised once, by .finish"
            )

    def untouched(self, sums: GradientSums) -> list[int]:
        touched = sums.touched()
        return [i for i, parameter in enumerate(self._parameters()) if id(parameter) not in touched]

    def reduce(self, sums: GradientSums, factor: Number | Tensor, untouched: list[int]) -> Number | Tensor:
        """Divided before, so that what is sent has the size of a gradient, in the parameter's dtype as DDP wants it."""
        parameters = self._parameters()
        self._scale(sums, parameters, sums.join(factor))
        wide = [(parameter, parameter.grad_dtype) for parameter in parameters if _is_wide(parameter)]
        for parameter, _ in wide:
            _convert(parameter, parameter.dtype)
        if any(module.gradient_as_bucket_view for module in self._modules):
            sums.copy_before()  # it may lie in the buckets
        for module, (of_module, expect_sparse) in zip(self._modules, self._shared, strict=True):
            reduce_gradients(module, of_module, expect_sparse)
            module.reducer._rebuild_buckets()  # in time for a process whose next batch has no rows, hence no forward
            module.require_forward_param_sync = _NOT_CALLED
        for i in untouched:
            parameters[i].grad = None
        for parameter, dtype in wide:
            _convert(parameter, dtype)
        return 1

    def _parameters(self) -> list[Tensor]:
        return [parameter for of_module, _ in self._shared for parameter in of_module]


def _refuse(module: DistributedDataParallel) -> None:
    """What records the order of hooks over a whole backward, or replaces them, cannot be told that sums are ready."""
    if module.static_graph:
        raise OptionError(
            "DistributedDataParallel(static_graph=True) expects each iteration to fire the hooks of its first one, but "
            "a batch is several local backwards and one reduction: leave it out. find_unused_parameters=True is not "
            "needed instead, unused parameters are found by the batch"
        )
    if module.mixed_precision is not None:
        raise OptionError(
            "DistributedDataParallel(mixed_precision=...) exchanges the parameters' contents within each forward, and "
            "is not supported: use torch.autocast in the loss function, and a communication hook to send less"
        )
    if module._use_python_reducer or module._delay_all_reduce_params:
        raise OptionError(
            'this DistributedDataParallel reduces gradients without its reducer (optimize_ddp="python_reducer", or '
            "delay_all_reduce_named_params), which is not supported: leave that option out"
        )


def _is_wide(parameter: Tensor) -> bool:
    """Whether gradients are summed in another dtype than the parameter's."""
    return parameter.grad_dtype != parameter.dtype or (
        parameter.grad is not None and parameter.grad.dtype != parameter.dtype
    )


def _convert(parameter: Tensor, dtype: torch.dtype | None) -> None:
    gradient = parameter.grad
    parameter.grad = None
    set_grad_dtype(parameter, dtype)
    parameter.grad = gradient if gradient is None else gradient.to(dtype or gradient.dtype)
