"""Cut: a batch becomes pieces along its rows.

Rows are the leading axis of the batch's tensors, which must agree on its length. 0-d tensors and everything
that is not a tensor go whole to each piece. Pieces are views, made and moved to the model's device one at a
time.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .._errors import BatchError
from .._plan import balanced
from .._sample import rows_to_take
from ._tree import disassembled, map_tensors, tensors
from ._window import Window

_VIEWS = 16
"""Pieces whose views are made together: by itself, in the middle of other work, each takes twice as long."""

IGNORED = -100
"""The label of tokens that do not count."""


class Cut:
    """A batch with its plan: iterate to get `(piece, rows)`; rows are None where they cannot be told.

    Args:
        batch: what is cut.
        micro_batch_size: the most rows of a piece.
        num_micro_batches: the number of pieces, instead.
        may_be_empty: whether a batch of 0 rows has no pieces, instead of being an error.
    """

    def __init__(
        self,
        batch: Any,
        micro_batch_size: int | None,
        num_micro_batches: int | None,
        *,
        may_be_empty: bool = False,
    ) -> None:
        self._batch = batch
        self.sizes: Sequence[int | None]
        if isinstance(batch, Window):
            self.sizes = [rows_if_known(piece) for piece in batch]
            if self.rows == 0:
                if not may_be_empty:
                    raise BatchError("the batch is empty: the pieces of the Window have 0 rows")
                self._batch, self.sizes = (), []
        else:
            rows = rows_of(batch, may_be_empty=may_be_empty)
            sizes = {"micro_batch_size": micro_batch_size, "num_micro_batches": num_micro_batches}
            self.sizes = balanced(rows, **sizes) if rows else []

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def rows(self) -> int | None:
        """Rows of the whole batch, where every piece's are known."""
        known = [size for size in self.sizes if size is not None]
        return sum(known) if len(known) == len(self.sizes) else None

    def __iter__(self) -> Iterator[tuple[Any, int | None]]:
        return self.on(None)

    def on(self, device: torch.device | None) -> Iterator[tuple[Any, int | None]]:
        """The pieces, each brought to the device when its turn comes."""
        if isinstance(self._batch, Window):
            for piece, size in zip(self._batch, self.sizes, strict=True):
                yield to_device(piece, device), size
            return
        parts, build = disassembled(to_device(self._batch, device, whole=True))
        elsewhere = device is not None and any(part.device != device for part in parts)
        sizes = [size for size in self.sizes if size is not None]
        rows = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        for start in range(0, len(rows), _VIEWS):
            some = slice(start, start + _VIEWS)
            views = [[part[of_piece] for of_piece in rows[some]] for part in parts]
            for size, *of_parts in zip(sizes[some], *views, strict=True):
                piece = build(of_parts)
                yield to_device(piece, device) if elsewhere else piece, size

    def turns(self, number: int, device: torch.device | None) -> Iterator[tuple[Any, int | None]]:
        """The pieces as `on` the device, and the first one again until there were that many."""
        yield from self.on(device)
        for _ in range(len(self), number):
            yield next(self.on(device))


def rows_of(batch: Any, *, may_be_empty: bool = False) -> int:
    """How many rows the batch has, or an error that says why it cannot be cut."""
    rows, problem = _shared_rows(batch)
    if rows is None:
        raise BatchError(problem)
    if rows == 0 and not may_be_empty:
        raise BatchError("the batch is empty: its tensors have 0 rows")
    return rows


def rows_if_known(piece: Any) -> int | None:
    """How many rows a piece has, if that can be told."""
    return _shared_rows(piece)[0]


def spread_rows(batch: Any, rows: int) -> Any:
    """As many rows, spread over the batch, with those that are the emptiest and the fullest of them."""
    chosen = torch.tensor(rows_to_take(rows_of(batch), rows, _unusual_rows(batch)))
    return map_tensors(lambda tensor: tensor[chosen.to(tensor.device)] if tensor.dim() else tensor, batch)


def _unusual_rows(batch: Any) -> list[int]:
    """Rows with the fewest and with the most entries that count for nothing: zeros in a mask, ignored labels."""
    found = []
    for _, tensor in tensors(batch):
        if tensor.dim() and tensor.numel() and tensor.layout == torch.strided:
            empty = ((tensor == 0) | (tensor == IGNORED)).reshape(len(tensor), -1).sum(1)
            if empty.min() < empty.max():
                found += [int(empty.argmin()), int(empty.argmax())]
    return found


def to_device(piece: Any, device: torch.device | None, *, whole: bool = False) -> Any:
    """A piece on the model's device; or of a batch what goes whole to each piece.

    Only a copy away from the host may run ahead of it safely.
    """
    if device is None:
        return piece
    ahead = device.type != "cpu"

    def moved(tensor: Tensor) -> Tensor:
        stays = tensor.device == device or (whole and tensor.dim())
        return tensor if stays else tensor.to(device, non_blocking=ahead)

    return map_tensors(moved, piece)


def _shared_rows(piece: Any) -> tuple[int | None, str]:
    """How many rows the tensors agree on, or None and what stands against it."""
    rows: int | None = None
    first = ""
    for path, tensor in tensors(piece):
        if not tensor.dim():
            continue
        if rows is None:
            rows, first = tensor.shape[0], path
        elif tensor.shape[0] != rows:
            advice = "; a list of micro-batches is given as Window(...)" if isinstance(piece, list) else ""
            return None, f"batch rows differ: {first} has {rows}, {path} has {tensor.shape[0]}{advice}"
    if rows is None:
        return (
            None,
            f"no tensor with rows in the batch, which is a {type(piece).__name__}: there is nothing to cut",
        )
    return rows, ""
