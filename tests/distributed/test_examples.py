"""The examples run under torchrun as their first lines say, but for processes that it forks, to load torch once."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str) -> str:
    forking = ["--run-path", "--start-method", "fork"]
    launched = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *forking, *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(launched, capture_output=True, text=True, timeout=60, env=environment)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_example_trains(name):
    options = ["--steps", "30"]
    command = f"torchrun --nproc-per-node 2 examples/{name}.py"
    assert command in (ROOT / "examples" / f"{name}.py").read_text()
    assert command in (ROOT / "docs" / "distributed.md").read_text()
    printed = run(str(ROOT / "examples" / f"{name}.py"), *options)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 4
    assert losses[-1] < 0.95 * losses[0]
    assert "NO" not in printed
