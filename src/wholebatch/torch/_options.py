"""The options of `Accumulator`, and what may be given for them."""

from typing import Any, Literal, TypedDict

import torch

from .._errors import OptionError, OptionTypeError
from ._auto import MicroBatchSize
from ._in_place import InPlace
from ._processes import Sync
from ._regroup import LengthFunction, TrimFunction
from ._sums import SumDtype

BatchNorm = Literal["refuse", "micro"]
OnNonfinite = Literal["raise", "skip", "keep"]


class SumOptions(TypedDict, total=False):
    """The options of `Accumulator` that say how pieces are summed."""

    accum_dtype: SumDtype
    in_place: InPlace
    batch_norm: BatchNorm
    on_nonfinite: OnNonfinite
    sync: Sync


class RunOptions(SumOptions, total=False):
    """The options of `Accumulator` that `train` hands on."""

    num_micro_batches: int | None
    micro_batch_tokens: int | None
    lengths: LengthFunction | None
    trim: TrimFunction | None


class Options(RunOptions, total=False):
    """The options of `Accumulator`."""

    micro_batch_size: MicroBatchSize
    memory: int | str | None


def check_options(accum_dtype: Any, in_place: Any, batch_norm: Any, on_nonfinite: Any, sync: Any) -> None:
    """Raise where one of them cannot be meant."""
    if accum_dtype != "auto" and not (isinstance(accum_dtype, torch.dtype) and accum_dtype.is_floating_point):
        raise OptionTypeError(f'accum_dtype must be "auto" or a floating point torch.dtype, got {accum_dtype!r}')
    if in_place not in (True, False, "auto"):
        raise OptionError(f'in_place must be True, False or "auto", got {in_place!r}')
    if batch_norm not in ("refuse", "micro"):
        raise OptionError(f'batch_norm must be "refuse" or "micro", got {batch_norm!r}')
    if on_nonfinite not in ("raise", "skip", "keep"):
        raise OptionError(f'on_nonfinite must be "raise", "skip" or "keep", got {on_nonfinite!r}')
    if sync not in ("once", "overlap", "every"):
        raise OptionError(f'sync must be "once", "overlap" or "every", got {sync!r}')
