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
        self.numbers: list[Number] = []
        self._buffer: Tensor | None = None
        self._slots: tuple[Tensor, ...] = ()  # its entries, as indexing a tensor takes longer than writing to it
        self._taken: torch.dtype | None = None

    def append(self, value: Count) -> None:
        """Take the next piece's."""
        if not isinstance(value, Tensor):
            self.numbers.append(value)
            return
        at = len(self.numbers)
        if at >= len(self._slots) or value.dtype != self._taken:
            self._make_room(value)
        self._slots[at].copy_(value.detach())
        self.numbers.append(0)

    def __len__(self) -> int:
        return len(self.numbers)

    def sum(self) -> Count:
        """A number if there were only numbers."""
        on_host = sum(self.numbers)
        return on_host if self._buffer is None else self._buffer.sum() + on_host

    def on_device(self) -> Tensor | None:
        """All entries, or None if there were only numbers."""
        if self._buffer is None:
            return None
        entries = self._grown(self._buffer, len(self.numbers))[: len(self.numbers)]
        if not any(self.numbers):
            return entries
        whole = all(isinstance(number, int) for number in self.numbers)
        dtype = torch.int64 if whole else torch.promote_types(entries.dtype, torch.float32)
        return entries + numbers_on(entries.device, self.numbers, dtype)

    def _make_room(self, value: Tensor) -> None:
        self._taken, dtype = value.dtype, _wide(value.dtype)
        if self._buffer is None:
            self._buffer = torch.zeros(self._capacity, dtype=dtype, device=value.device)
        elif self._buffer.dtype != dtype:  # such as a constant 0 in the first piece
            self._buffer = self._buffer.to(torch.promote_types(self._buffer.dtype, dtype))
        self._buffer = self._grown(self._buffer, len(self.numbers) + 1)
        self._slots = self._buffer.unbind()

    def _grown(self, buffer: Tensor, entries: int) -> Tensor:
        """With room for that many entries; doubling makes it rare that there is none."""
        missing = entries - len(buffer)
        return buffer if missing <= 0 else torch.cat([buffer, buffer.new_zeros(max(missing, len(buffer)))])


def numbers_on(device: torch.device, numbers: list[Number], dtype: torch.dtype) -> Tensor:
    """Numbers as a tensor on a device, without waiting for it: only pinned memory is copied behind the host's back."""
    on_host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def _wide(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float32 if dtype.itemsize < 4 else dtype
