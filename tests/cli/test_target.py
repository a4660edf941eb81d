"""Targets: what a command is to work on."""

import pytest

from wholebatch.cli._target import TargetError, front_end, load


def test_a_file_and_a_module_are_targets(write):
    write("mine.py", "def make():\n    return 1, 2, 3\n")
    assert load("mine.py:make") == (1, 2, 3)
    assert load("mine:make") == (1, 2, 3)


def test_a_file_elsewhere_imports_its_neighbours(write):
    write("sub/neighbour_of_it.py", "ONE = 1\n")
    path = write("sub/that.py", "from neighbour_of_it import ONE\ndef make():\n    return [ONE, 2, 3, 4]\n")
    assert load(f"{path}:make") == (1, 2, 3, 4)


@pytest.mark.parametrize("target", ["train.py", "make", ":make", "train.py:", ""])
def test_a_target_names_a_place_and_a_function(target):
    with pytest.raises(TargetError, match="TARGET must be module:factory or file.py:factory, got"):
        load(target)


def test_what_is_missing_is_named(write):
    write("has_nothing.py", "make = 3\n")
    with pytest.raises(TargetError, match="there is no file nowhere.py"):
        load("nowhere.py:make")
    with pytest.raises(TargetError, match="there is no module 'nowhere_at_all' to import"):
        load("nowhere_at_all:make")
    with pytest.raises(TargetError, match="has_nothing.py has no function 'other'"):
        load("has_nothing.py:other")
    with pytest.raises(TargetError, match="has_nothing.py has no function 'make'"):
        load("has_nothing.py:make")


def test_what_a_module_lacks_is_its_own_error(write):
    write("lacking.py", "import a_module_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        load("lacking:make")


@pytest.mark.parametrize("returned", ["None", "(1, 2)", "{'model': 1}"])
def test_a_factory_returns_what_the_function_takes(write, returned):
    write("wrong.py", f"def make():\n    return {returned}\n")
    with pytest.raises(
        TargetError, match=r"must return \(model, loss_fn, batch\) for torch or \(fun, params, \*batch\) for JAX"
    ):
        load("wrong.py:make")


def test_the_front_end_follows_what_comes_first():
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(1, 1)
    assert front_end((model, print, 1)).__name__ == "wholebatch.torch"
    assert front_end(([model], print, 1)).__name__ == "wholebatch.torch"
    assert front_end((list(model.parameters()), print, 1)).__name__ == "wholebatch.torch"
    assert front_end((print, {}, 1)).__name__ == "wholebatch.jax"
