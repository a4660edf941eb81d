"""Modules that normalise by statistics of the batch, or keep them.

Cut, they normalise each piece by its own statistics, which is another function: refused, or accepted under
"micro". There the running statistics still follow the whole batch, that of all processes, once per batch: with N
values per channel, mean m and variance v, pooled from those of the pieces,

    running ← (1 - momentum) · running + momentum · (m, v · N / (N - 1))

A piece is made to leave its own statistics in the running buffers by a momentum of 1 while the batch is open; those of
SyncBatchNorm, which leaves what it learned from other processes, are computed from what it is given. A module that is
called several times per piece is pooled call by call.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from .._errors import BatchNormError
from ._agree import Share
from ._model import Model
from ._peers import Alone
from ._pools import Pool, pool_over

_SCRIPTED = {f"BatchNorm{axes}d" for axes in (1, 2, 3)}


def keepers(model: Model) -> dict[str, _NormBase]:
    """The modules that a cut would change, by name: those in use with statistics of the batch."""
    return {name: module for name, module in model.named_modules().items() if _sees_the_batch(module)}


def sees_all(keeper: _NormBase, whole: Share, processes: Alone) -> bool:
    """Whether a module sees the whole batch at once: in the only piece, or as SyncBatchNorm in one of each process."""
    if isinstance(keeper, nn.SyncBatchNorm) and whole.turns == 1:
        return processes.are_those_of(keeper.process_group)
    return whole.pieces == 1


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
        f"{names}: normalised by the statistics of each piece, so the gradient is not that of the whole batch; the "
        "running statistics are, over all pieces and processes",
        UserWarning,
        stacklevel=_levels_to_the_caller(),
    )


def _levels_to_the_caller() -> int:
    """How many calls lie between `warn` and the line outside of this package that led to it."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(f"{__package__}."):
        frame, levels = frame.f_back, levels + 1
    return levels


class Statistics:
    """The statistics of a batch's pieces, until the running ones follow the whole.

    On a failure buffers are as a piece left them: whoever runs the pieces restores them.

    Args:
        found: the modules.
    """

    def __init__(self, found: dict[str, _NormBase]) -> None:
        self._modules = [module for module in found.values() if module.running_mean is not None]
        self._followed: list[_Followed] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Within, the modules may be called piece by piece."""
        try:
            for module in self._modules:
                self._followed.append(_Followed(module))
            yield
            for one in self._followed:
                one.read_last_call()
        finally:
            for one in self._followed:
                one.release()

    def start_piece(self, again: bool = False) -> None:
        """Call before each piece; one that was there before adds nothing."""
        for one in self._followed:
            one.start_piece(again)

    @property
    def calls(self) -> list[list[int]]:
        """How many values per channel each call of each module saw."""
        return [[pool.count for pool in one.pools] for one in self._followed]

    def settle(self, processes: Alone, whole: list[list[int]]) -> None:
        """Let the running statistics follow those of the whole.

        Args:
            processes: who shares the batch.
            whole: the calls of all processes.
        """
        for one, calls in zip(self._followed, whole, strict=True):
            one.expect(len(calls))
        pool_over(processes, [pool for one in self._followed for pool in one.pools], list(chain(*whole)))
        for one in self._followed:
            one.settle()


def _sees_the_batch(module: nn.Module) -> TypeGuard[_NormBase]:
    if isinstance(module, torch.jit.ScriptModule):
        return module.training and module.original_name in _SCRIPTED
    if isinstance(module, _InstanceNorm):  # normalises each row by itself, and may keep the mean over rows
        return module.training and module.track_running_stats
    if isinstance(module, _BatchNorm):
        return module.training or module.running_mean is None
    return False


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
        self._again = False
        self._calls_in_piece = 0
        self._count_of_last_call: int | None = None
        self.pools: list[Pool] = []
        module.momentum = 1.0
        self._hook = module.register_forward_pre_hook(self._before_call, with_kwargs=True)

    def start_piece(self, again: bool) -> None:
        """Begin with the first call again."""
        self.read_last_call()
        self._calls_in_piece, self._again = 0, again

    def expect(self, calls: int) -> None:
        """Have a pool for each call that there was in some process."""
        self.pools += [self._new_pool() for _ in range(len(self.pools), calls)]

    def settle(self) -> None:
        """Let the running statistics follow the pooled ones, one call after the other."""
        (mean, variance), calls = self._before, 0
        for pool in self.pools:
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

    def read_last_call(self) -> None:
        """Take the statistics that the last call has left, if there was one since."""
        count, self._count_of_last_call = self._count_of_last_call, None
        if count is not None:
            biased = 1 if self._by_row or not count else (count - 1) / count
            self._add(count, self._mean, self._variance * biased)

    @torch.no_grad()
    def _before_call(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        self.read_last_call()
        if not module.training:  # such a call wants the statistics of before, and adds none
            # behind autograd's back, which has saved the buffers for a backward that does not read them
            self._mean.data.copy_(self._before[0])
            self._variance.data.copy_(self._before[1])
            return
        if self._again:
            return
        values = args[0] if args else kwargs["input"]
        count = len(values) if self._by_row else values.numel() // values.shape[1]
        if count and isinstance(module, nn.SyncBatchNorm):
            wide = values.to(torch.promote_types(values.dtype, self._mean.dtype))
            variance, mean = torch.var_mean(wide, [0, *range(2, values.dim())], correction=0)
            self._add(count, mean, variance)
        else:
            self._count_of_last_call = count

    def _add(self, count: int, mean: Tensor, variance: Tensor) -> None:
        if self._calls_in_piece == len(self.pools):
            self.pools.append(self._new_pool())
        pool = self.pools[self._calls_in_piece]
        self._calls_in_piece += 1
        if count:
            pool.add(count, mean, variance)

    def _new_pool(self) -> Pool:
        return Pool(self._mean, between=not self._by_row)


def _buffer(buffer: Tensor | None) -> Tensor:
    assert buffer is not None
    return buffer
