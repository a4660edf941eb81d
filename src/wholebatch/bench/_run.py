"""Runs cases: one process for each measurement, so that none inherits another's memory or threads."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any

from .._errors import OptionError, WholeBatchError
from ._case import OURS, PEERS, SAME, Case, Setting
from ._cases import CASES
from ._machine import machine, threads, versions


class BenchError(WholeBatchError, RuntimeError):
    """A measurement did not come to its end."""


def select(wanted: Sequence[str]) -> list[tuple[str, Setting]]:
    """Cases and settings by name: `a` is a case, `a/4` one of its settings. Nothing named is all of them.

    Args:
        wanted: the names.
    """
    known = [(name, setting) for name, case in CASES.items() for setting in case.settings]
    chosen = []
    for name in wanted or CASES:
        found = [(case, setting) for case, setting in known if name in (case, f"{case}/{setting.name}")]
        if not found:
            case = name.partition("/")[0]
            ways = [f"{case}/{setting.name}" for setting in CASES[case].settings] if case in CASES else list(CASES)
            raise OptionError(f"there is no case {name!r}: known are {', '.join(ways)}")
        chosen += [pair for pair in found if pair not in chosen]
    return chosen


def missing(case: Case) -> dict[str, str]:
    """Who cannot take part, and why; if the front end is not there, that is everybody.

    Args:
        case: the case.
    """
    needed = {name: [PEERS[name]] if name in PEERS else [] for name in case.contenders}
    front_end = ["jax", "optax"] if case.front_end == "jax" else ["torch"]
    reasons = {}
    for name, packages in needed.items():
        absent = [package for package in front_end + packages if importlib.util.find_spec(package) is None]
        if absent:
            reasons[name] = f"{absent[0]} is not installed"
    return reasons


def measure(case: Case, setting: Setting, *, quick: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure one setting: yields what is done next and what is known so far; the last holds everything.

    Args:
        case: the case.
        setting: one of its settings.
        quick: on small problems, to see whether all works; the figures say nothing.
    """
    left_out = missing(case)
    names = [name for name in case.contenders if name not in left_out]
    options = {**setting.options, **(case.quick if quick else {})}
    job = {"front_end": case.front_end, "problem": case.problem, "options": options, "size": setting.micro_batch_size}
    job |= {"threads": threads(), "rounds": 5 if quick else setting.rounds, "repeats": setting.repeats}
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "quick": quick,
        "machine": machine(),
        "versions": versions(),
        "micro_batch_size": setting.micro_batch_size,
        "left_out": left_out,
        "contenders": {},
    }
    yield "checking that all compute the same", record
    checked = _run(
        {**job, "do": "check", "names": names, "options": {**options, **(case.quick if quick else case.checked)}}
    )
    for name, difference in checked.items():
        if not difference <= SAME:
            left_out[name] = f"computes something else: weights are off by {difference:.0e} of their change"
    names = [name for name in names if name not in left_out]
    if OURS not in names:
        return
    yield "taking turns", record
    record |= _run({**job, "do": "time", "names": names})
    for name in names:
        record["contenders"][name]["difference"] = checked[name]
        if setting.peaks and name not in PEERS:
            yield f"peak memory of {name}", record
            record["contenders"][name]["peak_bytes"] = _run({**job, "do": "peak", "names": [name]})
    yield "done", record


def _run(job: dict[str, Any]) -> Any:
    command = [sys.executable, "-m", f"{__package__}._worker", json.dumps(job)]
    environment = dict(os.environ)
    if job["do"] == "peak":
        # glibc gives large blocks back at once, so that its own habits stay out of the measurement
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        raise BenchError(f"{job['do']} of {job['problem']} ({', '.join(job['names'])}): {last}")
    return json.loads(ended.stdout.splitlines()[-1])
