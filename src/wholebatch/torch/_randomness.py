"""Randomness while a loss is being examined: where it was, and what the loss does without it."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .._generators import PythonGenerators, kept_generators
from ._model import Model
from ._state import Snapshot


class Start:
    """Buffers and every generator that a loss may draw from, as they were at the start.

    Args:
        model: whose buffers.
        own_generators: those that the loss keeps to itself.
    """

    def __init__(self, model: Model, own_generators: "OwnGenerators") -> None:
        self._snapshot = Snapshot(model)
        self._host = torch.get_rng_state()
        self.python = PythonGenerators(own_generators.of_python)
        self._elsewhere = any(parameter.device.type != "cpu" for parameter in model.parameters())
        self.own_generators = own_generators

    def restore(self) -> None:
        """Put everything back."""
        self.restore_buffers()
        self.restore_generators()

    def has_drawn(self) -> bool:
        """Whether a generator on the host has moved on; that of another device is taken to have."""
        return (
            not torch.equal(torch.get_rng_state(), self._host)
            or self.python.have_moved()
            or bool(self.own_generators.states)
            or self._elsewhere
        )

    def restore_buffers(self) -> None:
        """Put back the model's buffers alone."""
        self._snapshot.restore_buffers()

    def restore_generators(self) -> None:
        """Put back the random generators alone."""
        self._snapshot.restore_generators()
        self.python.restore()
        self.own_generators.restore()


class OwnGenerators(TorchFunctionMode):
    """Notes the generators that a loss hands to torch's functions, as they are before they are drawn from.

    Args:
        holders: what may hold others, of Python's and NumPy's.
    """

    def __init__(self, *holders: Any) -> None:
        super().__init__()
        self.of_python = kept_generators(*holders)
        self.states: dict[torch.Generator, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = (kwargs or {}).get("generator")
        if generator is not None and generator not in self.states:
            self.states[generator] = generator.get_state()
        return func(*args, **(kwargs or {}))

    def restore(self) -> None:
        """Put them back."""
        for generator, state in self.states.items():
            generator.set_state(state)


class SameDraws(TorchDispatchMode):
    """Every row draws what the first one drew, in every call, so that chance does not tell pieces from the whole.

    The n-th draw of a call is the n-th of the first call, whatever its number of rows.

    Args:
        axes: how many leading axes may be the one of the rows; within recurrent nets it is the second.
        seed: makes other draws; None for those that the loss would make first.
    """

    def __init__(self, axes: int = 1, seed: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes, self.seed = axes, seed
        self._drawn: dict[Any, Tensor] = {}
        self._draws = 0

    def begin_call(self) -> None:
        """The next draw is the first one."""
        self._draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return returned
        if func is torch.ops.aten.native_dropout.default:
            dropped, mask = returned
            self._repeat(mask)
            dropped.copy_(args[0] * mask / (1 - args[1]) if args[1] < 1 else torch.zeros_like(dropped))
        elif isinstance(returned, Tensor):
            self._repeat(returned)
        return returned

    def _repeat(self, drawn: Tensor) -> None:
        alike = min(self._axes, drawn.dim())
        key = (self._draws, drawn.shape[alike:])
        self._draws += 1
        if not drawn.numel():
            return
        first = self._drawn.setdefault(key, drawn[(0,) * alike].clone())
        drawn.copy_(first.expand_as(drawn))
