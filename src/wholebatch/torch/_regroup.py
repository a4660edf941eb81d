"""Regroup: rows share a piece with rows of about their length, and right padding beyond the longest is trimmed.

The gradient does not notice as long as what is trimmed is padding, that adds nothing to the loss. So what would be
trimmed is looked at first: it has to be one value throughout, and nothing that a mask or labels say is counted.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .._errors import BatchError, OptionError, OptionTypeError
from .._packing import packed, sorted_into
from .._plan import balanced, positive_integer
from .._terms import described
from ._cut import IGNORED, Cut, rows_of, to_device
from ._host import read_once
from ._tree import disassembled, tensors
from ._window import Window

LengthFunction = Callable[[Any], Any]
TrimFunction = Callable[[Any, int], Any]


class ByLength:
    """How rows are regrouped.

    Args:
        lengths: takes a batch, returns each row's length.
        budget: the most tokens that a piece may have, padding included.
        trim: takes a piece and its longest length, returns the piece without what is beyond.
    """

    def __init__(self, lengths: LengthFunction, budget: int | None, trim: TrimFunction | None) -> None:
        self.lengths = lengths
        self.budget = budget
        self.trim = trim

    @classmethod
    def of(cls, lengths: Any, micro_batch_tokens: Any, trim: Any, sizes: tuple[Any, Any]) -> "ByLength | None":
        """What the options mean, or an error where they cannot be meant; None without `lengths`."""
        for name, function in {"lengths": lengths, "trim": trim}.items():
            if function is not None and not callable(function):
                takes = (
                    "the batch that returns each row's length"
                    if name == "lengths"
                    else "a piece and its longest length"
                )
                raise OptionTypeError(f"{name} must be a function of {takes}, got {type(function).__name__}")
        budget = None
        if micro_batch_tokens is not None:
            budget = positive_integer("micro_batch_tokens", micro_batch_tokens)
            for name, size in zip(("micro_batch_size", "num_micro_batches"), sizes, strict=True):
                if size is not None:
                    raise OptionError(
                        f"both micro_batch_tokens={budget} and {name}={size!r} were given: give one of them, the other "
                        "follows from the batch"
                    )
        if lengths is None:
            for name, given in {"micro_batch_tokens": budget, "trim": trim}.items():
                if given is not None:
                    raise OptionError(f"{name} needs lengths=, a function of the batch that returns each row's length")
            return None
        return cls(lengths, budget, trim)


class Regrouped(Cut):
    """A batch with its plan, as `Cut`; the longest rows come first.

    Args:
        batch: as for `Cut`, but no `Window`.
        by_length: how rows are regrouped.
        micro_batch_size: as for `Cut`, where there is no budget.
        num_micro_batches: as for `Cut`, where there is no budget.
        may_be_empty: as for `Cut`.
    """

    def __init__(
        self,
        batch: Any,
        by_length: ByLength,
        micro_batch_size: int | None,
        num_micro_batches: int | None,
        *,
        may_be_empty: bool = False,
    ) -> None:
        if isinstance(batch, Window):
            raise BatchError(
                "a Window is cut already, and lengths= regroups the rows of a whole batch: give that, or no lengths="
            )
        self._batch = batch
        self._trim = by_length.trim
        self._groups: list[list[int]] = []
        self._longest: list[int] = []
        self.sizes = []
        rows = rows_of(batch, may_be_empty=may_be_empty)
        if not rows:
            return
        self._width = None if self._trim else _padded_width(batch)
        lengths = _read_lengths(by_length.lengths(batch), rows, None if self._width is None else (batch, self._width))
        if by_length.budget is None:
            sizes = balanced(rows, micro_batch_size=micro_batch_size, num_micro_batches=num_micro_batches)
            self._groups = sorted_into(lengths, sizes)
        else:
            self._groups = packed(lengths, by_length.budget)
        # no module takes sequences of no token
        self._longest = [max(1, *(lengths[row] for row in group)) for group in self._groups]
        self.sizes = [len(group) for group in self._groups]

    def on(self, device: torch.device | None) -> Iterator[tuple[Any, int | None]]:
        """The pieces, each brought to the device when its turn comes."""
        parts, build = disassembled(to_device(self._batch, device, whole=True))
        order = torch.tensor(list(chain.from_iterable(self._groups)))
        orders = {place: to_device(order, place).split(self.sizes) for place in {part.device for part in parts}}
        for i, (size, longest) in enumerate(zip(self.sizes, self._longest, strict=True)):
            piece = [self._taken(part, orders[part.device][i], longest) for part in parts]
            built = to_device(build(piece), device)
            yield self._trim(built, longest) if self._trim else built, size

    def _taken(self, part: Tensor, rows: Tensor, longest: int) -> Tensor:
        if part.dim() > 1 and part.shape[1] == self._width:
            part = part[:, :longest]
        return part if len(self.sizes) == 1 else part.index_select(0, rows)


def _padded_width(batch: Any) -> int:
    """How wide rows are padded to: the widest table of tokens, or of anything where there is none."""
    wide = [(path, tensor) for path, tensor in tensors(batch) if tensor.dim() > 1]
    tables = [(path, tensor) for path, tensor in wide if tensor.dim() == 2 and not tensor.is_floating_point()]
    if not wide:
        raise BatchError(
            "lengths= was given, but no tensor in the batch has an axis 1 that padding could be trimmed from: "
            "give trim=, a function of a piece and its longest length that returns the piece to compute"
        )
    return max(tensor.shape[1] for _, tensor in tables or wide)


def _read_lengths(given: Any, rows: int, padded: tuple[Any, int] | None) -> list[int]:
    """Each row's length, where what is beyond them is padding; one read where they are on a device."""
    try:
        lengths = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BatchError(f"lengths= must return one length for each row, got {described(given)}") from error
    if lengths.shape != (rows,):
        raise BatchError(
            f"lengths= must return one length for each of the {rows} rows, got shape {tuple(lengths.shape)}"
        )
    paths, flags = [], []
    if padded is not None:
        for path, tensor in tensors(padded[0]):
            if tensor.dim() > 1 and tensor.shape[1] == padded[1]:
                paths.append(path)
                flags.append(_more_than_padding(path, tensor, to_device(lengths, tensor.device)))
    on_host, *arrived = read_once([lengths, *flags])
    numbers: list[int] = []
    for row, length in enumerate(on_host.tolist()):
        if length < 0 or length != int(length):
            raise BatchError(f"lengths= must return whole numbers of at least 0, got {length} for row {row}")
        if padded is not None and length > padded[1]:
            raise BatchError(f"lengths= says that row {row} has length {length}, but rows are {padded[1]} wide")
        numbers.append(int(length))
    for path, more in zip(paths, arrived, strict=True):
        if more.any():
            row = int(more.int().argmax())
            raise BatchError(
                f"{path} holds more than padding beyond length {numbers[row]} of row {row}: only right padding can be "
                "trimmed, which is the same value everywhere. Pad on the right, correct lengths=, or give trim=, a "
                "function of a piece and its longest length"
            )
    return numbers


def _more_than_padding(path: str, tensor: Tensor, lengths: Tensor) -> Tensor:
    """For each row, whether something beyond its length is not what is beyond the shortest row's.

    A mask and labels say besides what is counted. Positions are the same beyond a row as within.
    """
    columns = torch.arange(tensor.shape[1], device=tensor.device)
    beyond = columns >= lengths.unsqueeze(1)
    differs = tensor != tensor[:, -1:].index_select(0, lengths.argmin(keepdim=True))  # which waits for no device
    if tensor.dim() > 2:
        return (differs.flatten(2).any(2) & beyond).any(1)
    if _named(path, "attention_mask"):
        differs = differs | (tensor != 0)
    if _named(path, "labels"):
        ignored = tensor == IGNORED
        differs = differs | (~ignored & ignored.any())
    return (differs & beyond).any(1) & (tensor != columns).any()


def _named(path: str, name: str) -> bool:
    return path.endswith((f".{name}", f'["{name}"]'))
