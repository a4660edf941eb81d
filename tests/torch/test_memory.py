"""Peak memory grows with the piece, not with the batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")

PROGRAM = """
import json, re, sys
from pathlib import Path
import torch
from wholebatch.torch import Accumulator

torch.set_num_threads(1)
torch.manual_seed(0)
rows, options = int(sys.argv[1]), json.loads(sys.argv[2])
model = torch.nn.Sequential(*[layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64 * 512, 256)[:rows]  # the data is the same size whatever is used of it

def resident(what):
    return int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

def loss_fn(piece):
    return model(piece).square().mean()

before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here; getrusage's would hold the parent's
Accumulator(model, **options).step(loss_fn, x, optimizer)
print(resident("VmHWM") - before)
"""


def grown(rows: int, **options: int) -> int:
    """How many KiB the resident size grew over the first step."""
    command = [sys.executable, "-c", PROGRAM, str(rows), json.dumps(options)]
    # glibc gives large blocks back at once, so that its own habits stay out of the measurement
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


@pytest.fixture(scope="module")
def four_pieces():
    return grown(4 * 512, micro_batch_size=512)


def test_64_pieces_need_what_4_pieces_of_the_same_size_need(four_pieces):
    assert grown(64 * 512, micro_batch_size=512) == pytest.approx(four_pieces, rel=0.05)


def test_the_measurement_sees_a_larger_piece(four_pieces):
    assert grown(4 * 512, micro_batch_size=2048) > 1.9 * four_pieces
