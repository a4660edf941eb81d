"""Several processes under `torchrun`: the same run, and one writer of files."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch
from tiny import SMALLEST, STEPS, TINY, everything, records

from wholebatch.pretrain.ranks import Ranks
from wholebatch.pretrain.settings import Settings
from wholebatch.pretrain.torch_backend import TorchBackend
from wholebatch.pretrain.torch_model import GPT

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


@pytest.fixture
def under_torchrun(monkeypatch):
    """As the only process that it has started."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "a run"}
    for name, value in {**started, "WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))


def test_one_process_under_torchrun_is_like_one_without(train, under_torchrun, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *given: asked.append(given))
    ours = train()
    assert ours.code == 0, ours.error
    assert len(asked) == 6  # at each step, whether one of them is to end
    assert not torch.distributed.is_initialized()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert everything(ours.folder) == everything(train(out="alone").folder)


def test_what_fails_under_torchrun_leaves_the_group_without_waiting(train, under_torchrun, monkeypatch):
    monkeypatch.setattr(torch.distributed, "barrier", None)
    assert train("--heads", 3).code == 2
    assert not torch.distributed.is_initialized()


def test_a_process_that_is_not_the_first_writes_and_says_nothing(train, under_torchrun, monkeypatch):
    """What it gets from the first is what it would have made."""
    monkeypatch.setattr(Ranks, "first", False)
    monkeypatch.setattr(Ranks, "from_first", lambda self, make: make())
    ran = train()
    assert (ran.code, ran.out, ran.error) == (0, "", "")
    assert not ran.folder.exists()


def test_where_memory_runs_out_unequal_shares_go_on_with_the_first_ones_half(monkeypatch):
    ranks, real = Ranks.alone(), GPT.forward

    def forward(self, ids):
        if len(ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(self, ids)

    monkeypatch.setattr(GPT, "forward", forward)
    monkeypatch.setattr(ranks, "from_first", lambda make: make() - 1)
    settings = Settings.of({**SMALLEST, "micro_batch_size": "auto", "steps": 4})
    backend = TorchBackend(settings, 257, ranks)
    backend.use(5)
    backend.step(np.random.default_rng(0).integers(257, size=(5, 9)), 1, 0.01)
    assert backend.micro_batch_size == 1


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
    needed = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("two", "one")]
    buckets = 8 * needed[0]["parameters"]
    assert needed[0]["memory_by_rows"]["2"] - needed[1]["memory_by_rows"]["2"] == pytest.approx(buckets, rel=0.1)
    assert two[-1]["validation_loss"] == pytest.approx(one[-1]["validation_loss"], abs=1e-12)
