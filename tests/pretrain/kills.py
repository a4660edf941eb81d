"""Kill a run at random moments and resume it, until it is done; it has to end with the bits of one that was not killed.

python tests/pretrain/kills.py [KILLS]
"""

import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from tiny import TINY, everything, write_text

from wholebatch.pretrain.checkpoints import OPTIMIZER, STATE, WEIGHTS
from wholebatch.pretrain.files import damaged
from wholebatch.pretrain.metrics import read


def train(arguments: list[str]) -> None:
    """One life."""
    import torch

    from wholebatch import cli

    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        code = cli.run(["train", *arguments])
    os._exit(code)


def survive(kills: int, place: Path, steps: int) -> tuple[int, int]:
    """Kill that often; returns how many runs were completed meanwhile, and how many lives took a step.

    Args:
        kills: how many.
        place: an empty folder.
        steps: of each run.
    """
    options = [*TINY, "--steps", str(steps), "--checkpoint-every", "5", "--validate-every", "7", "--data"]
    options += [str(write_text(place / "text.txt")), "--cache", str(place / "cache"), "--dropout", "0.1"]
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(
        ["wholebatch.pretrain.run", "wholebatch.pretrain.torch_backend", "wholebatch.cli.train"]
    )
    draw = random.Random(0)

    def live(*arguments: str):
        life = processes.Process(target=train, args=([*options, *arguments],))
        life.start()
        return life

    whole, broken = place / "whole", place / "broken"
    for _ in range(2):  # the first one starts the server
        start = time.perf_counter()
        life = live("--out", str(whole), "--overwrite")
        life.join()
        assert life.exitcode == 0
        longest = time.perf_counter() - start
    runs = killed = moved = 0
    before = 0
    while killed < kills or runs == 0:
        life = live("--out", str(broken), "--resume")
        life.join(draw.uniform(0, longest) if killed < kills else None)
        if life.exitcode is None:
            life.kill()
            life.join()
            killed += 1
            readable(broken)
            at = max((record["step"] for record in read(broken / "metrics.jsonl")), default=0)
            moved += at != before
            before = at
            continue
        assert life.exitcode == 0, f"ended with {life.exitcode}"
        assert everything(broken) == everything(whole), "other bits than those of the run that was not killed"
        runs += 1
        if killed < kills:
            broken = place / f"broken-{runs}"
            before = 0
    return runs, moved


def readable(folder: Path) -> None:
    """Nothing that has its own name is half written."""
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    assert len(list(read(folder / "metrics.jsonl"))) == len(lines)
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        assert damaged(checkpoint, (WEIGHTS, OPTIMIZER, STATE)) is None, checkpoint


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        count = int(sys.argv[1]) if len(sys.argv) > 1 else 50
        completed, moving = survive(count, Path(folder), steps=150)
        print(f"{count} kills, {moving} of them after new steps; {completed} runs completed with the same bits")
