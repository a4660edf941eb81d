"""Stand-ins: tensors without contents, in the place of a model's, an optimizer's and a batch's.

A stand-in (PyTorch's fake tensor) has a shape, a dtype and a device, and takes no memory. Modules hold theirs in the
tables where they held the real ones, which nothing touches meanwhile; a parameter that was given by itself is replaced
in the call of each operation.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from .._errors import PlanError
from ._model import Model
from ._tree import map_tensors

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class StandIns:
    """The stand-ins for a model. Within, modules hold them; afterwards every module is as it was.

    Args:
        model: the model.
        device: where the stand-ins of what is on the meta device are.
    """

    def __init__(self, model: Model, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Model:
        with ExitStack() as stack:
            stack.callback(self._restore)
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            for module in self._model.modules:
                for inner in module.modules():
                    self._replace(inner)
            loose = [member for member in self._model.members if isinstance(member, Tensor)]
            if loose:
                stack.enter_context(_Replacing(self))
            members = [self.of(member) if isinstance(member, Tensor) else member for member in self._model.members]
            model = Model(members)
            self._stack = stack.pop_all()
        return model

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[Tensor]:
        for _, stand_in in self._pairs.values():
            yield stand_in

    def get(self, tensor: Tensor) -> Tensor:
        """The stand-in of a tensor, or the tensor itself if it has none."""
        return self._pairs[id(tensor)][1] if id(tensor) in self._pairs else tensor

    def of(self, tensor: Tensor) -> Tensor:
        """The stand-in of a tensor, made if it has none."""
        if id(tensor) not in self._pairs:
            self._pairs[id(tensor)] = (tensor, stand_in(tensor, self._device))
        return self._pairs[id(tensor)][1]

    def _replace(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise PlanError(f"a {type(module).__name__} cannot be followed: plan the module that it was made from")
        if isinstance(module, nn.SyncBatchNorm) and module.training and dist.is_available() and dist.is_initialized():
            raise PlanError(
                "SyncBatchNorm asks other processes in each forward, and planning asks nobody: plan the model with its "
                "BatchNorm, before it is converted, and give the size"
            )
        # a forward may leave tensors among a module's attributes too
        self._before += [(table, dict(table)) for table in (module.__dict__, module._parameters, module._buffers)]
        if isinstance(module, DistributedDataParallel):  # what it does before a forward is for other processes
            module.require_backward_grad_sync = module.require_forward_param_sync = False
            module._pre_forward = lambda *inputs, **options: (inputs, options)  # type: ignore[method-assign]
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = self.of(tensor)  # type: ignore[assignment]

    def _restore(self) -> None:
        for table, entries in self._before:
            table.clear()
            table.update(entries)


class _Replacing(TorchFunctionMode):
    """Stand-ins in the arguments of every operation."""

    def __init__(self, stand_ins: StandIns) -> None:
        super().__init__()
        self._stand_ins = stand_ins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, self._stand_ins.get, (args, kwargs or {}))
        return func(*args, **kwargs)


def stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor like it, within a `FakeTensorMode`; what is on the meta device is on `device` instead."""
    if type(tensor) not in _PLAIN or tensor.layout != torch.strided:
        raise PlanError(
            f"a {type(tensor).__name__} of layout {tensor.layout} cannot be followed: only plain dense tensors can; "
            "choose the size by trying instead"
        )
    on = device if tensor.device.type == "meta" else tensor.device
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=on)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(like, requires_grad=tensor.requires_grad)
    return like.requires_grad_(tensor.requires_grad)


def stand_in_optimizer(optimizer: Optimizer, stand_ins: StandIns, device: torch.device) -> Optimizer:
    """An optimizer of the same kind, state and options that steps the stand-ins."""
    while isinstance(getattr(type(optimizer), "param_groups", None), property):  # it wraps another
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    shadow: Optimizer = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__.pop("step", None)  # a scheduler puts one there that steps the real parameters
    shadow.param_groups = [
        {**group, "params": [stand_ins.get(p) for p in group["params"]], **_foreach(group)}
        for group in optimizer.param_groups
    ]
    # counts of steps have no rows, and are numbers that optimizers read
    of_state = lambda tensor: stand_in(tensor, device) if tensor.dim() else torch.tensor(1.0)  # noqa: E731
    shadow.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        shadow.state[stand_ins.get(parameter)] = map_tensors(of_state, state)
    return shadow


def _foreach(group: dict[str, Any]) -> dict[str, Any]:
    """Optimizers choose their loop over all parameters by the parameters' type, which a stand-in does not have."""
    if group.get("foreach") is not None or "foreach" not in group or group.get("fused"):
        return {}
    _, foreach = _default_to_fused_or_foreach(group["params"], bool(group.get("differentiable")), use_fused=False)
    return {"foreach": foreach}


def stand_in_batch(batch: Any, rows: int, device: torch.device) -> Any:
    """A batch of that many rows in the same structure. What has no rows stays as it is."""

    def of_rows(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        on = device if tensor.device.type == "meta" else tensor.device
        like = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=on)
        return like.requires_grad_(tensor.requires_grad)

    return map_tensors(of_rows, batch)
