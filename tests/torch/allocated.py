"""How many bytes a program holds at most, by the profiler's memory events."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_of(program: Callable[[], Any], folder: Path) -> int:
    """The most bytes of the host's memory that were allocated while it ran, by what it allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        program()
    trace = folder / "trace.json"
    profiled.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    events = sorted((event for event in events if event["args"]["Device Type"] == 0), key=lambda event: event["ts"])
    before = events[0]["args"]["Total Allocated"] - events[0]["args"]["Bytes"]  # what earlier profiles saw no end of
    return max(event["args"]["Total Allocated"] for event in events) - before
