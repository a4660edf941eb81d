"""The examples of loops that exist already run, and end where whole batches end."""

import importlib
import sys
from pathlib import Path

import pytest

LOOPS = Path(__file__).parents[2] / "examples" / "loops"


@pytest.fixture(autouse=True)
def example_path(monkeypatch):
    monkeypatch.syspath_prepend(str(LOOPS))
    yield
    for path in LOOPS.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("bare", 1e-9), ("accelerate_loop", 1e-9), ("fabric_loop", 1e-6), ("lightning_module", 1e-9)],
)
@pytest.mark.filterwarnings("ignore")
def test_the_loop_before_is_wrong_in_the_short_window_and_the_one_after_is_right(name, tolerance):
    bare, example = importlib.import_module("bare"), importlib.import_module(name)
    meant = bare.whole()
    assert bare.difference(meant, bare.make_model()) > 1e-3, "training moved the weights"
    assert bare.difference(example.after(), meant) < tolerance
    assert bare.difference(example.before(), meant) > 1e-5


@pytest.mark.parametrize(("name", "tolerance"), [("trainer", 1e-5), ("gan", 1e-9)])
@pytest.mark.filterwarnings("ignore")
def test_cut_batches_end_where_whole_ones_do(name, tolerance):
    bare, example = importlib.import_module("bare"), importlib.import_module(name)
    before = example.before()
    start = example.make_model() if name == "trainer" else example.nn.ModuleList(example.make_players())
    assert bare.difference(before, start) > 1e-3, "training moved the weights"
    assert bare.difference(example.after(), before) < tolerance


def test_every_example_is_tested():
    assert {path.stem for path in LOOPS.glob("*.py")} == {
        "bare", "accelerate_loop", "fabric_loop", "lightning_module", "trainer", "gan",
    }  # fmt: skip
