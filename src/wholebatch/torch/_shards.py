"""Shards: every process holds a part of each parameter (`fully_shard`) and some of the rows.

Collectives run inside each forward and backward, so the processes go through them in step: as many turns as the process
with most pieces has. One with fewer runs its first piece again with weight 0.

    once     unsharded gradients are summed in each process, and reduced with the last turn
    every    each turn's gradients are reduced; nothing unsharded outlives its turn
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .._errors import BatchError, OptionError
from ._gradients import scale
from ._loss import Number
from ._peers import Peers
from ._sums import GradientSums


class Shards(Peers):
    """The processes of FSDP modules.

    Args:
        modules: the modules that `fully_shard` was applied to, outermost first.
        every: whether gradients are reduced in each turn.
    """

    lockstep = True
    sharded = True

    def __init__(self, modules: list[Any], every: bool) -> None:
        self._modules, self._every = modules, every
        for module in modules:
            module.reshard()  # an outermost module stays whole after a forward without a backward
        self._groups = [group for module in modules for group in _param_groups(module)]
        mesh = self._groups[0].mesh_info.mesh
        if any(group.mesh_info.mesh != mesh for group in self._groups):
            raise OptionError("the model's parameters are sharded over different device meshes, which is not supported")
        if mesh.ndim > 1 and mesh.size() < dist.get_world_size():
            raise OptionError(
                f"parameters are sharded over a mesh of shape {tuple(mesh.shape)}, which is a part of a larger one: a "
                "two-dimensional mesh is supported where it holds all processes"
            )
        group = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
        assert group is not None
        super().__init__(group, self._groups[0].device)

    @contextmanager
    def apart(self) -> Iterator[None]:
        self.in_step = True
        try:
            yield
            self.in_step = False
        finally:
            self._synchronise(True)

    def turn(self, last: bool) -> None:
        self._synchronise(last or self._every)

    def reduce(self, sums: GradientSums, factor: Number | Tensor, untouched: list[int]) -> Number | Tensor:
        """They are reduced already: to their mean, or divided as `set_gradient_divide_factor` says."""
        if any(_unsharded_gradient(parameter) is not None for parameter in self._parameters()):
            raise BatchError(
                "fully_shard did not reduce the gradients: it did not see a backward reach the output of a forward. "
                "Return tensors from the module, in tuples, lists or dicts, and compute the loss from them"
            )
        self._scale(sums, [parameter.sharded_param for parameter in self._parameters()], sums.join(factor))
        for group in self._groups:
            if group.gradient_divide_factor is not None:
                gradients = [parameter.sharded_param.grad for parameter in group.fsdp_params]
                scale([g for g in gradients if g is not None], group.gradient_divide_factor / self.world)
        return 1

    def reset(self) -> None:
        for module in self._modules:
            if module._get_fsdp_state()._is_root and hasattr(module, "reset_iter_state"):
                module.reset_iter_state()
            module.reshard()
        for parameter in self._parameters():
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None

    def _parameters(self) -> list[Any]:
        return [parameter for group in self._groups for parameter in group.fsdp_params]

    def _synchronise(self, now: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(now, recurse=False)


def _param_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # there was one, or none, until torch 2.12
    return list(groups) if groups is not None else [g for g in [state._fsdp_param_group] if g is not None]


def _unsharded_gradient(parameter: Any) -> Tensor | None:
    unsharded = getattr(parameter, "_unsharded_param", None)
    return None if unsharded is None else unsharded.grad
