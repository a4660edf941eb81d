"""Replicas: every process holds the whole model (DDP) and some of the rows.

Pieces are local: nothing crosses the wire in their forwards and backwards. What DDP would exchange in its first forward
(buffers, once the order of its buckets) is exchanged before the first piece, by every process, since one without rows
calls no forward.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._errors import BatchError, OptionError
from ._gradients import set_grad_dtype
from ._loss import Number
from ._peers import Peers
from ._reduce import announce, reduce_gradients
from ._sums import GradientSums

_NOT_CALLED: Any = 1
"""Stands for True in `require_forward_param_sync` until the module is called outside a batch, which puts True there.

Such a call makes the reducer expect a backward; if none came, it would take a piece's for it.
"""


class Replicas(Peers):
    """The processes of DDP modules.

    Args:
        modules: the DDP modules of the model.
        overlaps: whether the reduction runs during the last piece's backward.
    """

    def __init__(self, modules: list[DistributedDataParallel], overlaps: bool = False) -> None:
        self._modules = modules
        self.overlaps = overlaps
        self._reduced = False
        self._waiting: dict[int, None] = {}
        self._hooks: list[Any] = []
        self.lockstep = any(
            isinstance(inner, nn.SyncBatchNorm) and inner.training for module in modules for inner in module.modules()
        )
        super().__init__(modules[0].process_group, modules[0].device)
        self._shared = [module._build_params_for_reducer() for module in modules]

    def refuse(self) -> None:
        for module in self._modules:
            _refuse(module)
        if not all(self.are_those_of(module.process_group) for module in self._modules):
            raise OptionError("the model's DDP modules belong to process groups of different ranks: give each its own")

    @property
    def clean(self) -> bool:
        return all(module.require_forward_param_sync is _NOT_CALLED for module in self._modules)

    def begin(self, clean: bool) -> None:
        super().begin(clean)
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
            self.in_step = self.lockstep
            yield
            self.in_step &= self.overlaps  # if so, until the reduction is over
        finally:
            for hook in self._hooks:
                hook.remove()
            for module, (gradients, buffers) in zip(self._modules, before, strict=True):
                module.require_backward_grad_sync, module.require_forward_param_sync = gradients, buffers

    def check_apart(self) -> None:
        if any(module.require_forward_param_sync for module in self._modules):  # a forward in no_sync clears it
            raise BatchError(
                "the DDP module was called where it synchronises each backward: compute the loss that you give to .add "
                "within `with model.no_sync():`, the batch is synchronised once, by .finish"
            )

    def carried(self, sums: GradientSums) -> list[Tensor]:
        if not self.overlaps or any(_is_wide(parameter) for parameter in self._parameters()):
            return []  # sums that are wide have to be rounded first
        self._prepare(sums)
        self._wait_for(self.untouched(sums))
        self._reduced = True
        return [announce(module, of_module) for module, (of_module, _) in zip(self._modules, self._shared, strict=True)]

    def settle(self, sums: GradientSums) -> None:
        if not self.overlaps:
            return
        if not self._reduced:
            self._waiting = dict.fromkeys(self.untouched(sums))
            self._reduce(sums)
        self.in_step = False

    def _wait_for(self, untouched: list[int]) -> None:
        """Learn which of these parameters the last piece reaches, since afterwards all of them have gradients."""
        parameters, finds = self._parameters(), any(module.find_unused_parameters for module in self._modules)
        self._waiting = dict.fromkeys(untouched)
        for i in untouched:
            if parameters[i].requires_grad:
                if finds:  # then DDP insists on a gradient where a failed batch, or a use outside of one, had one
                    parameters[i].grad = torch.zeros_like(parameters[i])
                arrived = functools.partial(self._arrived, i, 0 if finds else None)
                self._hooks.append(parameters[i].register_post_accumulate_grad_hook(arrived))

    def _arrived(self, i: int, untouched: int | None, parameter: Tensor) -> None:
        """Also called where nothing was added, which leaves the gradient's version as it was."""
        if parameter.grad is not None and parameter.grad._version != untouched:
            self._waiting.pop(i, None)

    def untouched(self, sums: GradientSums) -> list[int]:
        if self._reduced:
            return list(self._waiting)
        touched = sums.touched()
        return [i for i, parameter in enumerate(self._parameters()) if id(parameter) not in touched]

    def reduce(self, sums: GradientSums, factor: Number | Tensor, untouched: list[int]) -> Number | Tensor:
        """Divided before, so that what is sent has the size of a gradient, unless it was sent during the backward."""
        self._scale(sums, self._parameters(), sums.join(factor))
        if not self._reduced:
            self._reduce(sums)
        for module in self._modules:
            module.reducer._rebuild_buckets()  # in time for a process whose next batch has no rows, hence no forward
            module.require_forward_param_sync = _NOT_CALLED
        for i in untouched:
            self._parameters()[i].grad = None
        return 1

    def _reduce(self, sums: GradientSums) -> None:
        """In the parameters' dtypes, as DDP wants it."""
        parameters = self._parameters()
        wide = [(parameter, parameter.grad_dtype) for parameter in parameters if _is_wide(parameter)]
        for parameter, _ in wide:
            _convert(parameter, parameter.dtype)
        self._prepare(sums)
        for module, (of_module, expect_sparse) in zip(self._modules, self._shared, strict=True):
            reduce_gradients(module, of_module, expect_sparse)
        for parameter, dtype in wide:
            _convert(parameter, dtype)
        self._reduced = True

    def _prepare(self, sums: GradientSums) -> None:
        if any(module.gradient_as_bucket_view for module in self._modules):
            sums.copy_before()  # it may lie in the buckets

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
    if any(hasattr(parameter, "_st_info") for parameter in module.parameters()):
        raise OptionError(
            "DistributedDataParallel(device_mesh=...) around a tensor-parallel module makes new parameters in each "
            "forward, and is not supported: use fully_shard for the data axis of the mesh"
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
