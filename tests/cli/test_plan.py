"""`wholebatch plan`."""

import json

import pytest

from wholebatch import cli

TORCH = """
import torch
from wholebatch.torch import token_mean

def make():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(1000, 64), torch.nn.Linear(64, 1000))
        ids = torch.empty(32, 16, dtype=torch.long)
    return model, lambda piece: token_mean(model(piece), piece), ids
"""

JAX = """
import jax
from jax import numpy as jnp

def make():
    w, x = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((32, 64), "float32")
    return lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), w, x
"""


@pytest.fixture(params=["torch", "jax"])
def target(request, tmp_path):
    pytest.importorskip(request.param)
    file = tmp_path / f"of_{request.param}.py"
    file.write_text(TORCH if request.param == "torch" else JAX)
    return f"{file}:make"


def test_it_says_what_fits(target, capsys):
    assert cli.run(["plan", target, "--memory", "1GiB", "--optimizer", "adamw"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("micro_batch_size=32: 32 rows in one piece")
    assert "no optimizer was given" not in said


def test_json_is_for_programs(target, capsys):
    assert cli.run(["plan", target, "--memory", "1GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert (found["micro_batch_size"], found["num_micro_batches"]) == (32, 1)
    assert found["parts"]["optimizer"] == 0


def test_where_nothing_fits_the_answer_is_no_with_what_is_needed(target, capsys):
    assert cli.run(["plan", target, "--memory", "1KB"]) == 1
    assert "is too little: a step needs" in capsys.readouterr().out
    assert cli.run(["plan", target, "--memory", "1KB", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert cli.run(["plan", target, "--memory", f"{found['needed']}"]) == 0


def test_it_draws_a_picture(target, tmp_path):
    pytest.importorskip("matplotlib")
    assert cli.run(["plan", target, "--memory", "1GiB", "--plot", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--memory", "lots"], "memory must be a number and a unit"),
        (["--memory", "1GiB", "--optimizer", "adamx"], "has no optimizer 'adamx'"),
        ([], "--memory"),
    ],
)
def test_bad_usage(target, capsys, arguments, said):
    assert cli.run(["plan", target, *arguments]) == 2
    assert said in capsys.readouterr().err
