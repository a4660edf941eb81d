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
from pathlib import Path

from tiny import SMALLEST, everything, write_text

from wholebatch.pretrain import Request, Screen, run
from wholebatch.pretrain.checkpoints import FILES
from wholebatch.pretrain.files import CHECKSUMS, damaged
from wholebatch.pretrain.metrics import read

BEFORE_ITS_FIRST_STEP = 0.1
"""So many of the kills, while files are read, cut back and written; the others come later."""

LIVES = 3
"""Of a run, at least: each ends within so much of its time after the first step."""

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

    def first_step(self) -> None:
        """Wait until it has taken one, or is over."""
        self._steps.poll(None)

    def lasts(self, seconds: float | None = None) -> bool:
        """Wait so long; whether it goes on."""
        self._process.join(seconds)
        assert not self._process.exitcode, f"ended with {self._process.exitcode}"
        return self._process.exitcode is None

    def kill(self) -> bool:
        """As `kill -9`; whether it had taken a step."""
        self._process.kill()
        self._process.join()
        try:
            return bool(self._steps.recv())
        except EOFError:
            return False


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
        life.first_step()
        stepping = time.perf_counter()
        life.lasts()
        before, after = stepping - start, time.perf_counter() - stepping
    runs = killed = stepped = 0
    broken = place / "broken-0"
    while killed < kills or broken.exists():  # the last one is let live
        life = Life(processes, options, broken)
        if killed == kills:
            moment = None
        elif draw.random() < BEFORE_ITS_FIRST_STEP:
            moment = draw.uniform(0, before)
        else:
            life.first_step()
            moment = draw.uniform(0, after / LIVES)
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
