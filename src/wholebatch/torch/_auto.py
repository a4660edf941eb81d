"""Auto: the size of the pieces is found, and halved where memory runs out.

The first batch's size comes from the plan, if there is a budget or a device that says what is free. Where memory runs
out all the same, the batch is as if it had not begun, and begins again with half the piece: a sum may be cut anywhere,
so the batch that the step is for stays the same.
"""

import gc
import traceback
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

from .._budget import bytes_of
from .._errors import BudgetError, OptionError, RankError
from .._plan import balanced
from ._agree import is_out_of_memory
from ._cut import rows_if_known
from ._model import Model, only_device

MicroBatchSize = int | Literal["auto"] | None

Returned = TypeVar("Returned")

SPARE = 0.95
"""The share of a device's memory that may be planned with: its allocator loses some between the blocks."""


class AutoSize:
    """The size of the pieces that fits, as far as it is known.

    Args:
        memory: the budget, if there is one.
    """

    def __init__(self, memory: int | str | None) -> None:
        self._memory = None if memory is None else bytes_of(memory)
        self._chosen = False
        self.rows: int | None = None
        """The most rows of a piece; None for the whole batch."""

    def begin_with(self, rows: int) -> None:
        """Take a size that is known, in place of finding one."""
        self.rows, self._chosen = rows, True

    def choose(self, model: Model, loss_fn: Any, batch: Any, **options: Any) -> None:
        """Find a size for the first batch that has rows; those after it have the same.

        Args:
            model: the model.
            loss_fn: the loss function.
            batch: the first batch.
            options: those of `plan`.
        """
        if self._chosen or not rows_if_known(batch):
            return
        from ._plan import plan  # it rehearses with the accumulator, which has this

        device = only_device(model.parameters())
        if self._memory is not None:
            self.rows = plan(model.members, loss_fn, batch, memory=self._memory, **options).micro_batch_size
        elif device is not None and device.type == "cuda":
            try:
                self.rows = plan(model.members, loss_fn, batch, memory=_usable(device), **options).micro_batch_size
            except BudgetError:
                self.rows = 1  # close to what is free the plan may be wrong, so it is tried
            except Exception:  # what cannot be planned may still run; if that is not it, it fails again
                self.rows = None
        self._chosen = True

    def run(self, once: Callable[[], Returned], batch: Any) -> Returned:
        """Run a batch, and run it again with half the piece where memory has run out.

        Args:
            once: runs it with the size that is known now; leaves no trace if it fails.
            batch: the batch.
        """
        while True:
            try:
                return once()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                rows = rows_if_known(batch) or 1  # a process may hold none of the batch's
                piece = balanced(rows, micro_batch_size=self.rows)[0]
                if piece == 1 and not isinstance(error, RankError):  # which says that it is not this process
                    error.add_note(
                        "not even one row fits: shorter rows, torch.utils.checkpoint, a lower precision or a smaller "
                        "model take less memory"
                    )
                    raise
                _forget_frames(error)
            self.rows = max(1, piece // 2)
            _release()


def auto_size(micro_batch_size: Any, memory: int | str | None, **others: Any) -> AutoSize | None:
    """What finds the size, if that was asked for: by "auto", or by a budget and nothing else.

    Args:
        micro_batch_size: the option.
        memory: the budget, if there is one.
        others: the options that say in another way how a batch is cut, by name.
    """
    sizes = {name: given for name, given in others.items() if given is not None}
    auto = isinstance(micro_batch_size, str) and micro_batch_size == "auto"
    if micro_batch_size is not None and not auto:
        sizes["micro_batch_size"] = micro_batch_size
    for name, given in sizes.items() if auto or memory is not None else ():
        asked = 'micro_batch_size="auto"' if auto else f"memory={memory!r}"
        raise OptionError(f"both {asked}, which finds a size, and {name}={given!r} were given: give one of them")
    return AutoSize(memory) if auto or memory is not None else None


def _usable(device: torch.device) -> int:
    """What a step may hold: all that is free, and all that this process has taken."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(SPARE * (free + torch.cuda.memory_reserved(device)))


def _forget_frames(error: BaseException | None) -> None:
    """An error holds the frames that it passed, and they hold their tensors."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _release() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
