"""Lifetimes: which storages are alive when, and so how much memory a program holds at most.

    peak = max over time of Σ bytes of the storages alive

A storage is born as the output of an operation and dies with the last tensor that uses it; a weak reference tells.
Nothing here looks at a value, so tensors may be fake: then a program is followed without being run.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ._as_real import adds_in_place, returned_by
from ._scratch import scratch

Storage = int
"""A storage's identity, for as long as it lives."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened on one device.

    Args:
        order: `i` where the i-th storage is born and `-i` where it dies, from 1 on.
        sizes: their bytes, in the order of births.
        kinds: what is known about some of them, by number.
        granule: the allocator gives out multiples of that many bytes.
    """

    order: list[int]
    sizes: list[int]
    kinds: dict[int, str]
    granule: int = 1

    def peak(self) -> int:
        """The most bytes that were held."""
        return max(self._held(), default=0)

    def at_peak(self) -> dict[str, int]:
        """The bytes of each kind when the most were held, and under "" those of no kind."""
        bytes_of: dict[str, int] = {}
        for number in self.alive_at_peak():
            kind = self.kinds.get(number, "")
            bytes_of[kind] = bytes_of.get(kind, 0) + self._size(number)
        return bytes_of

    def alive_at_peak(self) -> set[int]:
        """The storages that were alive when the most was held."""
        held, alive = self._held(), set[int]()
        for number in self.order[: held.index(max(held)) + 1] if held else []:
            alive ^= {abs(number)}
        return alive

    def _held(self) -> list[int]:
        return list(accumulate(self._size(n) if n > 0 else -self._size(-n) for n in self.order))

    def _size(self, number: int) -> int:
        return -(-self.sizes[number - 1] // self.granule) * self.granule


@dataclass(frozen=True, slots=True)
class Line:
    """Timelines of programs that do the same with any number of rows.

    Args:
        rows: of one of them.
        timeline: of that one.
        growth: by how many bytes each of its storages grows with a row.
    """

    rows: int
    timeline: Timeline
    growth: list[int]

    @classmethod
    def through(cls, rows: int, timeline: Timeline, next_one: Timeline) -> "Line | None":
        """The line through two that are a row apart, or None if they do not do the same."""
        if (timeline.order, timeline.kinds) != (next_one.order, next_one.kinds):
            return None
        growth = [more - less for less, more in zip(timeline.sizes, next_one.sizes, strict=True)]
        return cls(rows, timeline, growth)

    def at(self, rows: int) -> Timeline:
        """The timeline with that many rows."""
        by = rows - self.rows
        sizes = [size + by * growth for size, growth in zip(self.timeline.sizes, self.growth, strict=True)]
        return replace(self.timeline, sizes=sizes)

    def growth_at_peak(self, rows: int) -> int:
        """By how many bytes the peak grows with a row, there."""
        return sum(self.growth[number - 1] for number in self.at(rows).alive_at_peak())


class Lifetimes(TorchDispatchMode):
    """Follows the storages on one device, while it is entered and afterwards.

    Args:
        device: the one whose memory is looked at.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._alive: dict[Storage, tuple[weakref.ref[Any], int]] = {}
        self._kinds: dict[Storage, str] = {}
        self._elsewhere: dict[Storage, weakref.ref[Any]] = {}
        self._numbers: dict[Storage, int] = {}
        self._timeline = self._new()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = returned_by(func, args, kwargs or {})
        if self._device.type == "cpu":
            for size in scratch(func, args, returned):
                self._passes(size)
        if adds_in_place(func, args):
            self._dies(args[0].untyped_storage()._cdata)
        aliases = any(result.alias_info is not None for result in func._schema.returns)
        for tensor in tree_leaves(returned):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self._see(tensor, counts=not aliases)
        return returned

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave out the storages of these."""
        for tensor in tensors:
            self._see(tensor, counts=False)

    def note(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Say what these tensors are; those that were not seen before are counted from now on."""
        for tensor in tensors:
            if tensor.layout == torch.strided:
                self._see(tensor, counts=True)
                storage = tensor.untyped_storage()._cdata
                if storage in self._alive:
                    self._kinds[storage] = kind

    def start(self, *, without: str | None = None) -> None:
        """Begin a new timeline, with what is alive, but for what is of one kind."""
        self._timeline, self._numbers = self._new(), {}
        for storage, (_, size) in self._alive.items():
            if without is None or self._kinds.get(storage) != without:
                self._is_born(storage, size)

    def stop(self) -> Timeline:
        """The timeline since `start`."""
        timeline = self._timeline
        for storage, number in self._numbers.items():
            if storage in self._kinds:
                timeline.kinds[number] = self._kinds[storage]
        self._timeline, self._numbers = self._new(), {}
        return timeline

    def bytes_of(self, kind: str) -> int:
        """The bytes that are alive of one kind."""
        return sum(size for storage, (_, size) in self._alive.items() if self._kinds.get(storage) == kind)

    def _new(self) -> Timeline:
        return Timeline([], [], {}, granule=512 if self._device.type == "cuda" else 1)

    def _see(self, tensor: Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or key in self._elsewhere or tensor.device != self._device:
            return
        if not counts:
            self._elsewhere[key] = weakref.ref(storage, lambda _: self._elsewhere.pop(key, None))
            return
        size = storage.nbytes()
        self._alive[key] = (weakref.ref(storage, lambda _: self._dies(key)), size)
        self._is_born(key, size)

    def _is_born(self, storage: Storage, size: int) -> None:
        self._timeline.sizes.append(size)
        self._numbers[storage] = len(self._timeline.sizes)
        self._timeline.order.append(len(self._timeline.sizes))

    def _passes(self, size: int) -> None:
        self._timeline.sizes.append(size)
        self._timeline.order.extend([len(self._timeline.sizes), -len(self._timeline.sizes)])

    def _dies(self, storage: Storage) -> None:
        self._alive.pop(storage, None)
        number, kind = self._numbers.pop(storage, None), self._kinds.pop(storage, None)
        if number is not None:
            self._timeline.order.append(-number)
            if kind is not None:
                self._timeline.kinds[number] = kind
