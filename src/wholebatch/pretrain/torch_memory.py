"""How many bytes of tensors a step holds at its largest, as the allocator counts them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Peak:
    """The most bytes held during what last ran within `watching`; elsewhere nothing is slowed down."""

    def __init__(self) -> None:
        self.bytes: int | None = None

    @contextmanager
    def watching(self, held: Callable[[], int]) -> Iterator[None]:
        """Watch; a host's allocator keeps no account, and so the profiler does.

        Args:
            held: bytes of the tensors that are there before and stay.
        """
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            yield
            libraries = torch.cuda.memory_allocated() - held()  # the workspaces of matrix products are no tensors
            self.bytes = torch.cuda.max_memory_allocated() - libraries
            return
        before = held()
        watched = torch.autograd.profiler.profile(use_kineto=False, profile_memory=True)
        with _quietly():
            watched.__enter__()
        try:
            yield
        finally:
            with _quietly():
                watched.__exit__(None, None, None)
        self.bytes = before + _highest(watched)


def _highest(watched: torch.autograd.profiler.profile) -> int:
    """The sum of what was taken and given back, at its largest."""
    recorded: Any = watched.kineto_results
    events = [event for event in recorded.events() if event.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest


@contextmanager
def _quietly() -> Iterator[None]:
    """The profiler's library says on standard error, past Python, that it starts and stops."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
