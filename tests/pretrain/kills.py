"""Kill a run at random moments and resume it, until it is done; it has to end with the bits of one that was not killed.

python tests/pretrain/kills.py [KILLS] [torch|jax]
"""

import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tiny import SMALLEST, everything, write_text

from wholebatch.pretrain import Request, Screen, run
from wholebatch.pretrain.checkpoints import FILES
from wholebatch.pretrain.files import CHECKSUMS, damaged
from wholebatch.pretrain.metrics import read

LIVES = 3
"""Of a run, at least: most of them end within so much of the time that all its steps take."""

OFTEN = {"checkpoint_every": 5, "validate_every": 7}


class Told(Screen):
    """Hands on which steps were taken.

    Args:
        tell: takes each.
    """

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell

    def step(self, record: dict) -> None:
        self._tell(record["step"])


def train(request: Request, pipe) -> None:
    """One life."""
    if request.given["backend"] == "torch":
        import torch

        torch.set_num_threads(1)
    ended = run(request, Told(pipe.send))
    os._exit(ended.how == "interrupted")


class Life:
    """A process that trains.

    Args:
        start: starts one that trains into the folder, and tells its steps to the pipe.
        out: the folder.
    """

    def __init__(self, processes, options: dict, out: Path) -> None:
        self._steps, pipe = processes.Pipe(duplex=False)
        request = Request(options, out, out.parent / "cache", resume=True)
        self._process = processes.Process(target=train, args=(request, pipe))
        self._process.start()
        pipe.close()  # so that the process is the only one that holds it, and its end can be seen
        self._taken = 0

    def takes(self, steps: int) -> bool:
        """Wait until it has taken so many, or is over; whether it has."""
        with suppress(EOFError):
            while self._taken < steps:
                self._steps.recv()
                self._taken += 1
        return self._taken >= steps

    def lasts(self, seconds: float | None = None) -> bool:
        """Wait so long; whether it goes on."""
        self._process.join(seconds)
        assert not self._process.exitcode, f"ended with {self._process.exitcode}"
        return self._process.exitcode is None

    def kill(self) -> bool:
        """As `kill -9`; whether it had taken a step."""
        self._process.kill()
        self._process.join()
        return self.takes(1)


def survive(kills: int, place: Path, steps: int, backend: str = "torch") -> tuple[int, int]:
    """Kill that often; returns how many runs were completed, and how many kills came after a step of their process.

    Args:
        kills: how many.
        place: an empty folder.
        steps: of each run.
        backend: "torch" or "jax".
    """
    text = str(write_text(place / "text.txt"))
    options = {**SMALLEST, "data": [text], "backend": backend, "dropout": 0.1, "steps": steps, **OFTEN}
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["wholebatch.pretrain.run", f"wholebatch.pretrain.{backend}_backend"])
    draw = random.Random(0)
    for whole in (place / "first", place / "whole"):  # the first one starts the server and fills the cache
        start = time.perf_counter()
        life = Life(processes, options, whole)
        life.takes(1)
        first = time.perf_counter()
        life.takes(steps)
        last = time.perf_counter()
        assert not life.lasts()
        end = time.perf_counter()
    runs = killed = stepped = 0
    broken = place / "broken-0"
    while killed < kills or broken.exists():  # the last one is let live
        life = Life(processes, options, broken)
        chance = draw.random()
        if killed == kills:
            moment = None
        elif chance < 0.1:  # while files are read, cut back and written
            moment = draw.uniform(0, first - start)
        elif chance < 0.9:
            life.takes(1)
            moment = draw.uniform(0, (last - first) / LIVES)
        else:  # also while the report is written
            life.takes(1)
            moment = draw.uniform(0, end - first)
        if life.lasts(moment):
            stepped += life.kill()
            killed += 1
            readable(broken)
        else:
            assert everything(broken) == everything(whole), "other bits than those of the run that was not killed"
            runs += 1
            broken = place / f"broken-{runs}"
    return runs, stepped


def readable(folder: Path) -> None:
    """Nothing that has its own name is half written."""
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    assert len(list(read(folder / "metrics.jsonl"))) == len(lines)
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        assert damaged(checkpoint, FILES) is None, checkpoint
    for file in folder.glob("[!.]*.json"):
        json.loads(file.read_text())
    assert not (folder / CHECKSUMS).exists() or damaged(folder, ()) is None


if __name__ == "__main__":
    count, framework = int((sys.argv[1:] or ["50"])[0]), (sys.argv[2:] or ["torch"])[0]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        completed, after_steps = survive(count, Path(folder), steps=300, backend=framework)
        print(
            f"{framework}: {count} kills in {time.perf_counter() - start:.0f} s, {after_steps} of them after new steps "
            f"of their process; {completed} runs completed, all with the same bits, and every file could be read"
        )
