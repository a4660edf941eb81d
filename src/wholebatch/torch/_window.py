"""Batches that arrive already cut: windows of micro-batches from a loader."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from .._errors import BatchError
from .._plan import positive_integer


class Window(Sequence[Any]):
    """A batch that is already cut: its pieces, in order.

    Args:
        pieces: the micro-batches, each in the structure that the loss function takes.

    >>> len(Window([("x0", "y0"), ("x1", "y1")]))
    2
    """

    def __init__(self, pieces: Iterable[Any]) -> None:
        self._pieces = tuple(pieces)
        if not self._pieces:
            raise BatchError("an empty Window: a batch needs at least one micro-batch")

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> "Window": ...
    def __getitem__(self, index: int | slice) -> Any:
        return Window(self._pieces[index]) if isinstance(index, slice) else self._pieces[index]

    def __len__(self) -> int:
        return len(self._pieces)

    def __repr__(self) -> str:
        return f"Window of {len(self)} micro-batches"


def windows(loader: Iterable[Any], size: int) -> Iterator[Window]:
    """Group a loader's micro-batches into windows; the last one may be short.

    Args:
        loader: anything that yields micro-batches. Its length need not be known.
        size: the number of micro-batches in a window, which is one optimizer step.

    >>> [len(window) for window in windows(range(10), 4)]
    [4, 4, 2]
    """
    return _windows(loader, positive_integer("size", size))


def _windows(loader: Iterable[Any], size: int) -> Iterator[Window]:
    pieces = []
    for piece in loader:
        pieces.append(piece)
        if len(pieces) == size:
            yield Window(pieces)
            pieces = []
    if pieces:
        yield Window(pieces)
