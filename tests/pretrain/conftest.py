"""A run that takes a fraction of a second: a tiny model, a short text, small steps."""

from types import SimpleNamespace

import pytest
from tiny import STEPS, TINY, remember_plans, write_text

from wholebatch import cli
from wholebatch.pretrain.torch_backend import TorchBackend


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text.txt")


@pytest.fixture(autouse=True)
def planned_once(monkeypatch):
    remember_plans(monkeypatch, TorchBackend)


@pytest.fixture
def train(tmp_path, text, capsys):
    """Run `wholebatch train`; what it said, its exit code and its files."""

    def run(*options, out="run", tiny=True, data=text, steps=STEPS):
        folder = tmp_path / out
        given = ["--out", folder, "--cache", tmp_path / "cache"]
        if data:
            given += ["--data", data]
        if tiny:
            given += [*TINY, *steps]
        capsys.readouterr()
        code = cli.run(["train", *map(str, [*given, *options])])
        said = capsys.readouterr()
        return SimpleNamespace(code=code, out=said.out, error=said.err.strip(), folder=folder)

    return run
