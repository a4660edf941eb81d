"""Files for commands to work on."""

import sys

import pytest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder of the test's own; what it puts on the path and imports is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.fixture
def write(elsewhere):
    """Put a file there."""

    def put(name, text):
        path = elsewhere / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return put
