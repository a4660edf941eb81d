"""Several processes under `torchrun`, several devices in JAX: the same run, and one writer of files."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tiny import STEPS, TINY, records, write_text

SHARED = ["--precision", "fp64", "--batch-size", "6", "--micro-batch-size", "4"]
UNEQUAL = ["--precision", "fp64"]  # five rows: three and two


def train(place: Path, out: str, options: list[str], *before: str, **environment: str) -> list[dict]:
    text = write_text(place / "text.txt")
    files = ["--out", place / out, "--cache", place / "cache", "--data", text]
    command = [sys.executable, "-m", *before, "wholebatch", "train", *TINY, *STEPS, *options, *map(str, files)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, error = process.communicate(timeout=100)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers too
    assert process.returncode == 0, error
    assert said.count("\ndone ") == 1
    return records(place / out)


def assert_same(ours: list[dict], theirs: list[dict]) -> None:
    for name in ("loss", "grad_norm"):
        assert [r[name] for r in ours] == pytest.approx([r[name] for r in theirs], abs=1e-12, rel=0)
    assert ours[-1]["validation_loss"] == pytest.approx(theirs[-1]["validation_loss"], abs=1e-12)


def test_two_processes_with_unequal_shares_are_one(tmp_path):
    torchrun = (
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "-m",
    )
    assert_same(train(tmp_path, "two", UNEQUAL, *torchrun), train(tmp_path, "one", UNEQUAL))


def test_two_devices_are_one(tmp_path):
    options = [*SHARED, "--backend", "jax"]
    flags = os.environ.get("XLA_FLAGS", "")
    two = train(tmp_path, "two", options, XLA_FLAGS=f"{flags} --xla_force_host_platform_device_count=2")
    assert_same(two, train(tmp_path, "one", SHARED))
