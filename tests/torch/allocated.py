"""How many bytes a program holds at most, by the profiler's memory events."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def peak_of(program: Callable[[], Any]) -> int:
    """The most bytes of the host's memory that were allocated while it ran, by what it allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        program()
    events = [
        (event.start_ns(), event.nbytes())
        for event in profiled.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    ]
    in_time = sorted(events, key=lambda event: event[0])
    return max(accumulate(size for _, size in in_time))
