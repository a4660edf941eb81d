"""Modules that normalise by statistics of the batch, or keep them.

Cut, they normalise each piece by its own statistics, which is another function: refused, or accepted under
"micro". There the running statistics still follow the whole batch, once per batch: with n_k values per channel,
mean m_k and variance v_k in piece k,

    N = Σ n_k,   m = Σ n_k m_k / N,   v = Σ n_k (v_k + (m_k - m)²) / N
    running ← (1 - momentum) · running + momentum · (m, v · N / (N - 1))

A piece is made to leave its own statistics in the running buffers by a momentum of 1 while the batch is open.
A module that is called several times per piece is pooled call by call.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from .._errors import BatchNormError
from ._model import Model

_SCRIPTED = {f"BatchNorm{axes}d" for axes in (1, 2, 3)}


def keepers(model: Model) -> dict[str, _NormBase]:
    """The modules that a cut would change, by name: those in use with statistics of the batch."""
    return {name: module for name, module in model.named_modules().items() if _sees_the_batch(module)}


def refuse(found: dict[str, _NormBase], *, in_a_loop: bool = False) -> None:
    """Name them, and the ways out."""
    if found:
        named = ", ".join(f"{name or 'the model'} ({type(module).__name__})" for name, module in found.items())
        raise BatchNormError(
            f"{named}: in training mode with statistics of the batch, which its pieces do not have. Ways out: "
            'batch_norm="micro" accepts normalisation per piece and keeps the running statistics those of the batch'
            + (", with .backward or .step, which call the modules themselves" if in_a_loop else "")
            + "; .eval() on these modules freezes them; GroupNorm and LayerNorm see one row at a time"
        )


def refuse_scripted(found: dict[str, _NormBase]) -> None:
    """Scripted modules cannot be followed."""
    refuse({name: module for name, module in found.items() if isinstance(module, torch.jit.ScriptModule)})


def warn(found: dict[str, _NormBase]) -> None:
    """What "micro" accepts, said once."""
    names = ", ".join(name or "the model" for name in found)
    warnings.warn(
        f"{names}: normalised by the statistics of each piece, so the gradient is not that of the whole batch; running "
        "statistics are",
        UserWarning,
        stacklevel=_levels_to_the_caller(),
    )


def _levels_to_the_caller() -> int:
    """How many calls lie between `warn` and the line outside of this package that led to it."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(f"{__package__}."):
        frame, levels = frame.f_back, levels + 1
    return levels


@contextmanager
def pooled(found: dict[str, _NormBase]) -> Iterator[Callable[[], None]]:
    """Within, the modules may be called piece by piece; call what is yielded before each piece.

    On success their running statistics follow the whole. On failure they are as a piece left them: whoever runs the
    pieces restores buffers.
    """
    followed: list[_Followed] = []

    def start_piece() -> None:
        for one in followed:
            one.start_piece()

    try:
        for module in found.values():
            if module.running_mean is not None:
                followed.append(_Followed(module))
        yield start_piece
        for one in followed:
            one.settle()
    finally:
        for one in followed:
            one.release()


def _sees_the_batch(module: nn.Module) -> TypeGuard[_NormBase]:
    if isinstance(module, torch.jit.ScriptModule):
        return module.training and module.original_name in _SCRIPTED
    if isinstance(module, _InstanceNorm):  # normalises each row by itself, and may keep the mean over rows
        return module.training and module.track_running_stats
    if isinstance(module, _BatchNorm):
        return module.training or module.running_mean is None
    return False


class _Pool:
    """Statistics of the values that one call of a module saw, over the pieces."""

    def __init__(self, like: Tensor) -> None:
        self.count = 0
        self.mean = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
        self.variance = torch.zeros_like(self.mean)

    def add(self, count: int, mean: Tensor, variance: Tensor, between: bool) -> None:
        total = self.count + count
        apart = mean - self.mean
        self.variance += (variance - self.variance) * (count / total)
        if between:
            self.variance += apart.square() * (self.count * count / total**2)
        self.mean += apart * (count / total)
        self.count = total


class _Followed:
    """A module whose running buffers show the statistics of its last call until `settle`.

    A call is noted before it begins and read before the next one: a checkpoint that computes a piece again may stop
    as soon as it has what it needs, before a hook at the end of the call.
    """

    def __init__(self, module: _NormBase) -> None:
        self._module = module
        self._momentum = module.momentum
        self._mean, self._variance = _buffer(module.running_mean), _buffer(module.running_var)
        self._tracked = module.num_batches_tracked
        self._before = (self._mean.clone(), self._variance.clone())
        self._tracked_before = None if self._tracked is None else self._tracked.clone()
        self._by_row = isinstance(module, _InstanceNorm)
        self._pools: list[_Pool] = []
        self._calls_in_piece = 0
        self._count_of_last_call: int | None = None
        module.momentum = 1.0
        self._hook = module.register_forward_pre_hook(self._before_call, with_kwargs=True)

    def start_piece(self) -> None:
        """Begin with the first call again."""
        self._read_last_call()
        self._calls_in_piece = 0

    def settle(self) -> None:
        """Let the running statistics follow the pooled ones, one call after the other."""
        self._read_last_call()
        (mean, variance), calls = self._before, 0
        for pool in self._pools:
            calls += not self._by_row
            if pool.count == 0:
                continue
            weight: float | Tensor = 0.0 if self._momentum is None else self._momentum
            if not self._by_row and self._momentum is None and self._tracked_before is not None:
                weight = 1 / (self._tracked_before + calls).to(pool.mean)
            mean = torch.lerp(mean.to(pool.mean), pool.mean, weight)
            unbiased = pool.variance if self._by_row else pool.variance * (pool.count / (pool.count - 1))
            variance = torch.lerp(variance.to(unbiased), unbiased, weight)
        self._mean.copy_(mean)
        self._variance.copy_(variance)
        if self._tracked is not None and self._tracked_before is not None:
            self._tracked.copy_(self._tracked_before + calls)

    def release(self) -> None:
        """Give the module back."""
        self._hook.remove()
        self._module.momentum = self._momentum

    def _before_call(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        self._read_last_call()
        if not module.training:  # such a call wants the statistics of before, and adds none
            # behind autograd's back, which has saved the buffers for a backward that does not read them
            self._mean.data.copy_(self._before[0])
            self._variance.data.copy_(self._before[1])
            return
        values = args[0] if args else kwargs["input"]
        self._count_of_last_call = len(values) if self._by_row else values.numel() // values.shape[1]

    def _read_last_call(self) -> None:
        count, self._count_of_last_call = self._count_of_last_call, None
        if count is None:
            return
        if self._calls_in_piece == len(self._pools):
            self._pools.append(_Pool(self._mean))
        pool = self._pools[self._calls_in_piece]
        self._calls_in_piece += 1
        if count == 0:
            return
        variance = self._variance if self._by_row else self._variance * ((count - 1) / count)
        pool.add(count, self._mean, variance, between=not self._by_row)


def _buffer(buffer: Tensor | None) -> Tensor:
    assert buffer is not None
    return buffer
