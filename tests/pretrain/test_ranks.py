"""Several processes under `torchrun`: the same run, and one writer of files."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from tiny import STEPS, TINY, records

TORCHRUN = [
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "localhost:0",
    "-m",
]


def test_two_processes_with_unequal_shares_are_one(train, text, tmp_path):
    """Of five rows one has three and the other two, in pieces of two."""
    files = ["--out", tmp_path / "two", "--cache", tmp_path / "cache", "--data", text]
    options = [*TINY, *STEPS, "--precision", "fp64", *map(str, files)]
    process = subprocess.Popen(
        [sys.executable, "-m", *TORCHRUN, "wholebatch", "train", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, error = process.communicate(timeout=100)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers too
    assert process.returncode == 0, error
    assert said.count("\ndone ") == 1
    assert "in each of 2 processes" in said
    two, one = records(tmp_path / "two"), records(train("--precision", "fp64", out="one").folder)
    for name in ("loss", "grad_norm"):
        assert [r[name] for r in two] == pytest.approx([r[name] for r in one], abs=1e-12, rel=0)
    assert two[-1]["validation_loss"] == pytest.approx(one[-1]["validation_loss"], abs=1e-12)
