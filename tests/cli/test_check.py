"""`wholebatch check`: the answer, its exit code, and what is wrong with a target."""

import json

import pytest

from wholebatch import cli

TORCH = """
import torch

def make(reduce="mean", model=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return model, lambda b: getattr(model(b["x"]).square(), reduce)(), {"x": torch.randn(20, 4)}

def wrong():
    return make("sum")

def ragged():
    return *make()[:2], {"x": torch.randn(20, 4), "y": torch.randn(3)}

def failing():
    return make()[0], lambda b: 1 / 0, {"x": torch.randn(20, 4)}

def infinite():
    model = torch.nn.Linear(4, 1)
    def loss_fn(b):
        if len(b["x"]) < 3:
            raise RuntimeError("too few rows")
        return model(b["x"]).square().mean()
    return model, loss_fn, {"x": torch.randn(20, 4)}
"""

JAX = """
from jax import numpy as jnp

def make():
    return lambda w, x: jnp.mean((x @ w) ** 2), jnp.ones(3), jnp.arange(24.0).reshape(8, 3)
"""


@pytest.fixture(autouse=True)
def targets(write):
    write("in_torch.py", TORCH)
    write("in_jax.py", JAX)


def test_exact_is_zero(capsys):
    assert cli.run(["check", "in_torch.py:make", "--micro-batch-size", "4"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("exact: ")
    assert said.err == ""


def test_not_exact_is_one_and_the_cause_is_told(capsys):
    assert cli.run(["check", "in_torch.py:wrong"]) == 1
    said = capsys.readouterr().out
    assert "cause   sum-as-mean" in said
    assert "remedy  return Sum(total)" in said
    assert max(map(len, said.splitlines())) <= 80


def test_json_holds_the_report(capsys):
    assert cli.run(["check", "in_torch.py:wrong", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["exact"] is False
    assert report["cause"] == "sum-as-mean"
    assert report["causes"] == ["sum-as-mean"]
    assert set(report["parameters"]) == {"weight", "bias"}
    assert set(report["cuts"]) == {"2", "3", "7"}


def test_json_knows_no_infinity(capsys):
    assert cli.run(["check", "in_torch.py:infinite", "--json"]) == 1
    said = capsys.readouterr().out
    assert "Infinity" not in said
    assert json.loads(said)["error"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nowhere.py:make"], 2, "there is no file nowhere.py"),
        (["in_torch.py:ragged"], 2, 'batch rows differ: batch["x"] has 20, batch["y"] has 3'),
        (["in_torch.py:make", "--micro-batch-size", "0"], 2, "micro_batch_size must be at least 1"),
        ([], 2, "Missing argument 'TARGET'"),
        (["in_torch.py:failing"], 3, "ZeroDivisionError: division by zero"),
    ],
    ids=["no file", "rows differ", "no size", "no target", "a loss that fails"],
)
def test_what_is_wrong_is_one_line_and_an_exit_code(capsys, arguments, code, says):
    assert cli.run(["check", *arguments]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert said.err.count("\n") == 1


def test_jax_is_known_by_its_function(capsys):
    assert cli.run(["check", "in_jax.py:make", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "float64"


def test_help_has_an_example(capsys):
    assert cli.run(["check", "--help"]) == 0
    assert "Example: wholebatch check train.py:make --micro-batch-size 8" in capsys.readouterr().out
