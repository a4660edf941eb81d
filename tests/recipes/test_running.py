"""`python -m wholebatch.recipes`: the list, each recipe by name, and what goes wrong."""

import importlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from wholebatch import recipes
from wholebatch.recipes import RECIPES
from wholebatch.recipes.__main__ import main

FRAMEWORKS = {"torch": ["torch_loop", "pretrain_lm"], "jax": ["linen", "nnx", "scan"]}


def test_every_module_is_listed():
    folder = Path(recipes.__file__).parent
    assert (
        {path.stem for path in folder.glob("[a-z]*.py")} == set(RECIPES) == {*FRAMEWORKS["torch"], *FRAMEWORKS["jax"]}
    )


@pytest.mark.parametrize("arguments", [[], ["--help"]], ids=["alone", "help"])
def test_without_a_name_it_lists_them_with_a_line_each(capsys, arguments):
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, shows in RECIPES.items():
        assert sum(line.split() == [name, *shows.split()] for line in lines) == 1


@pytest.mark.parametrize("name", FRAMEWORKS["jax"])  # those of torch have more to say, and tests of it
def test_each_runs_by_name_and_agrees_with_full_batches(capsys, name):
    assert main([name]) == 0
    assert "they agree" in capsys.readouterr().out


def test_options_are_the_arguments_of_its_main_and_hyphens_will_do(capsys):
    assert main(["pretrain-lm", "--vocabulary", "20", "--width", "4", "--micro-steps", "2"]) == 0
    assert "step   2" in capsys.readouterr().out


@pytest.mark.parametrize("name", RECIPES)
def test_every_option_has_a_line_of_help(capsys, name):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    recipe = importlib.import_module(f"wholebatch.recipes.{name}").main
    for option in recipe.__kwdefaults__:
        assert f"--{option.replace('_', '-')}" in said
        assert f" {option} (" not in said, "its name is no explanation"


def test_the_exit_code_says_that_results_do_not_agree(monkeypatch):
    from wholebatch.recipes import scan

    monkeypatch.setattr(scan, "main", lambda: False)
    assert main(["scan"]) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nope"], 2, "there is no recipe 'nope'; there are linen, nnx, torch_loop, scan, pretrain_lm"),
        (["scan", "--n", "10"], 2, "10 rows cannot be cut into 8 equal chunks: give a number that divides them"),
        (["torch_loop", "--micro-batch-size", "-1"], 3, "RuntimeError: "),
        (["torch_loop", "--lr", "1e38", "--num-samples", "32"], 3, "term 'loss' of piece 1 of 1 is "),
    ],
)
def test_what_goes_wrong_is_one_line(capsys, arguments, code, message):
    assert main(arguments) == code
    said = capsys.readouterr()
    assert said.err.startswith(f"python -m wholebatch.recipes: {message}")
    assert said.err.count("\n") == 1


def test_what_is_no_recipe_is_no_attribute():
    assert not hasattr(recipes, "keras")


def test_ctrl_c_is_said_in_one_line(capsys, monkeypatch):
    from wholebatch.recipes import scan

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(scan, "main", interrupted)
    assert main(["scan"]) == 130
    assert capsys.readouterr().err == "python -m wholebatch.recipes: interrupted\n"


def test_a_framework_that_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wholebatch.recipes.scan", None)
    assert main(["scan"]) == 2
    assert 'pip install "wholebatch[all]"' in capsys.readouterr().err


def test_a_module_runs_by_itself(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scan"])
    monkeypatch.delitem(sys.modules, "wholebatch.recipes.scan", raising=False)
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("wholebatch.recipes.scan", run_name="__main__")
    assert caught.value.code == 0
    assert "they agree" in capsys.readouterr().out


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_importing_them_loads_their_own_framework_alone(framework):
    code = f"""
import sys
import wholebatch.recipes
assert not {{"torch", "jax"}} & set(sys.modules), "the list alone needs none"
for name in {FRAMEWORKS[framework]}:
    assert callable(getattr(wholebatch.recipes, name).main)
assert {{"torch", "jax"}} & set(sys.modules) == {{"{framework}"}}
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""
