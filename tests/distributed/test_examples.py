"""The examples run under torchrun as their first lines say, here one after the other under the same one."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = "ddp", "fsdp"
LAST_STEP = 30


def run() -> str:
    launched = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__]
    finished = subprocess.run(launched, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_the_examples_train():
    for name in NAMES:
        command = f"torchrun --nproc-per-node 2 examples/{name}.py"
        assert command in (ROOT / "examples" / f"{name}.py").read_text()
        assert command in (ROOT / "docs" / "distributed.md").read_text()
    printed = run()
    losses = [(int(step), float(loss)) for step, loss in re.findall(r"step +(\d+)   loss (\d+\.\d+)", printed)]
    assert [step for step, _ in losses] == [1, 10, 20, LAST_STEP] * len(NAMES)
    for (_, first), (_, last) in (losses[:4][::3], losses[4:][::3]):
        assert last < 0.95 * first
    assert printed.count("weights are equal in all processes: yes") == 1


if __name__ == "__main__":
    for name in NAMES:
        sys.argv[1:] = ["--steps", str(LAST_STEP)]
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
