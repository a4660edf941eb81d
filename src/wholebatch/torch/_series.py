"""One number per piece, in one buffer.

Tensors that are kept one by one between the large, short-lived ones of a training step break up the heap: the
peak of the process then grows with the number of pieces. So a piece's scalars are copied into a buffer that was
there before, and nothing that a piece allocates outlives it.
"""

import torch
from torch import Tensor

from ._loss import Count, Number


class Series:
    """Numbers and scalar tensors in the order of the pieces.

    Numbers stay on the host and tensors on their device, in at least 32 bits (integers in 64); an entry of one
    kind is 0 among the other, so that the two can be added.
    """

    def __init__(self, expected: int | None) -> None:
        self._capacity = expected or 16
        self._numbers: list[Number] = []
        self._buffer: Tensor | None = None

    def append(self, value: Count) -> None:
        """Take the next piece's."""
        if isinstance(value, Tensor):
            self._room_for(value)[len(self._numbers)] = value.detach()
            self._numbers.append(0)
        else:
            self._numbers.append(value)

    def sum(self) -> Count:
        """A number if there were only numbers."""
        on_host = sum(self._numbers)
        return on_host if self._buffer is None else self._buffer.sum() + on_host

    def on_device(self) -> Tensor | None:
        """All entries, or None if there were only numbers."""
        if self._buffer is None:
            return None
        entries = self._buffer[: len(self._numbers)]
        return entries + torch.tensor(self._numbers).to(entries) if any(self._numbers) else entries

    def _room_for(self, value: Tensor) -> Tensor:
        if self._buffer is None:
            self._capacity = max(self._capacity, 2 * len(self._numbers))
            self._buffer = torch.zeros(self._capacity, dtype=_wide(value.dtype), device=value.device)
        elif len(self._numbers) == len(self._buffer):
            self._buffer = torch.cat([self._buffer, torch.zeros_like(self._buffer)])
        return self._buffer


def _wide(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float32 if dtype.itemsize < 4 else dtype
