"""Where and with what it was measured."""

import os
import platform
import re
from importlib import metadata
from pathlib import Path

_PACKAGES = ("wholebatch", "torch", "jax", "accelerate", "lightning", "optax", "numpy")


def threads() -> int:
    """As many as there are cores for this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> dict[str, str | int]:
    """The processor, the threads that are used and the system."""
    return {"processor": _processor(), "threads": threads(), "system": f"{platform.system()} {platform.machine()}"}


def versions() -> dict[str, str]:
    """Of Python and of what is installed and takes part."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        name = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        name = None
    return name[1].strip() if name else platform.processor() or platform.machine()
