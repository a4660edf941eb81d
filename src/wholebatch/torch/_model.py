"""What a user calls a model: a module, several modules, or parameters alone."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._errors import BatchError, OptionTypeError


class Model:
    """The modules and parameters that a gradient is for.

    Parameters are looked up anew for every batch, since people freeze them and add to them while they train.
    """

    def __init__(self, model: nn.Module | Iterable[nn.Module] | Iterable[Tensor]) -> None:
        if isinstance(model, Tensor) or not isinstance(model, nn.Module | Iterable):
            raise _not_a_model(model)
        members: list[Any] = [model] if isinstance(model, nn.Module) else list(model)
        self.members = members
        self.modules = [member for member in members if isinstance(member, nn.Module)]
        self._loose = [member for member in members if isinstance(member, Tensor)]
        if not members or len(self.modules) + len(self._loose) < len(members):
            raise _not_a_model(model if isinstance(model, nn.Module) else members)

    def named_parameters(self) -> dict[str, Tensor]:
        """Every parameter once, by name."""
        seen: set[int] = set()
        named: dict[str, Tensor] = {}
        for i, module in enumerate(self.modules):
            prefix = f"{i}." if len(self.modules) > 1 else ""
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    named[prefix + name] = parameter
        for i, loose in enumerate(self._loose):
            if id(loose) not in seen:
                seen.add(id(loose))
                named[f"parameter {i}"] = loose
        return named

    def named_modules(self) -> dict[str, nn.Module]:
        """Every module once, by name."""
        names: dict[nn.Module, str] = {}
        for i, module in enumerate(self.modules):
            prefix = f"{i}." if len(self.modules) > 1 else ""
            for name, inner in module.named_modules():
                names.setdefault(inner, prefix + name)
        return {name: module for module, name in names.items()}

    def parameters(self) -> list[Tensor]:
        """Every parameter once."""
        every: list[Tensor] = [parameter for module in self.modules for parameter in module.parameters()]
        every += self._loose
        if any(is_lazy(parameter) for parameter in every):
            raise BatchError("the model has parameters without a shape yet: lazy modules have to be called once before")
        return list(dict.fromkeys(every))


def require(parameters: list[Tensor]) -> list[Tensor]:
    """The parameters, unless there are none."""
    if not parameters:
        raise BatchError("the model has no parameters: there is nothing to compute gradients for")
    return parameters


def only_device(parameters: list[Tensor]) -> torch.device | None:
    """The device of all parameters, or None where they sit on several."""
    devices = {parameter.device for parameter in parameters}
    return devices.pop() if len(devices) == 1 else None


def _not_a_model(model: Any) -> OptionTypeError:
    return OptionTypeError(
        f"model must be a module, several modules or an iterable of parameters, got {type(model).__name__}"
        + ("" if not isinstance(model, list) else f" of {sorted({type(m).__name__ for m in model}) or 'nothing'}")
    )
