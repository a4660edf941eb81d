"""A run that takes a fraction of a second: a tiny model, a short text, small steps."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from wholebatch import cli

TINY = "--tokenizer bytes --width 8 --layers 1 --heads 2 --seq-len 8 --batch-size 5 --micro-batch-size 2".split()
STEPS = "--steps 6 --checkpoint-every 2 --validate-every 3".split()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(60)))
    return path


@pytest.fixture
def train(tmp_path, text, capsys):
    """Run `wholebatch train`; what it said, its exit code and its files."""

    def run(*options, out="run", tiny=True, data=text, steps=STEPS):
        folder = tmp_path / out
        given = ["--out", folder, "--cache", tmp_path / "cache", *options]
        if tiny:
            given += [*TINY, *steps]
        if data:
            given += ["--data", data]
        capsys.readouterr()
        code = cli.run(["train", *map(str, given)])
        said = capsys.readouterr()
        return SimpleNamespace(code=code, out=said.out, error=said.err.strip(), folder=folder)

    return run


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").iterdir())


def weights(folder: Path) -> bytes:
    """The newest checkpoint's, as they lie on the disk."""
    return (newest(folder) / "weights.safetensors").read_bytes()


def everything(folder: Path) -> dict[str, bytes]:
    """Weights and optimizer of the newest checkpoint."""
    return {name: (newest(folder) / f"{name}.safetensors").read_bytes() for name in ("weights", "optimizer")}


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
