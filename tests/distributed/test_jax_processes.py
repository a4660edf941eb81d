"""JAX over two processes, as real ones on this machine: the gradient of all rows, and one reduction a step."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from distributed import jax_worker
from reference import assert_exact

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "jax_data_parallel.py"
SECONDS = 90


def run_together(*commands):
    """The output of Python programs that run side by side; none is left behind."""
    started = []
    try:
        for command in commands:
            started.append(
                subprocess.Popen(
                    [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        ended = [process.communicate(timeout=SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    for process, (_, error) in zip(started, ended, strict=True):
        assert process.returncode == 0, error
    return [output for output, _ in ended]


def free_address():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two processes found."""
    files = [tmp_path_factory.mktemp("processes") / f"{process}.npz" for process in range(2)]
    address = free_address()
    run_together(*([jax_worker.__file__, address, 2, process, file] for process, file in enumerate(files)))
    return [dict(np.load(file)) for file in files]


@pytest.fixture(scope="module")
def whole():
    params, batch = jax_worker.make_problem()

    def objective(params):
        terms, by_row = jax_worker.loss_fn(params, *batch)
        return terms["token"].value + terms["row"], by_row

    with jax.enable_x64(True):
        (loss, by_row), grads = jax.value_and_grad(objective, has_aux=True)(params)
    return {"loss": np.asarray(loss), **grads}, np.asarray(by_row)


def test_every_process_has_the_loss_and_the_gradient_of_all_rows(found, whole):
    for process in found:
        assert_exact({name: process[name] for name in whole[0]}, whole[0])


def test_what_rows_report_stays_where_the_rows_are_in_their_order(found, whole):
    assert_exact({"rows": np.concatenate([process["rows"] for process in found])}, {"rows": whole[1]})


def test_gradients_cross_between_processes_once_and_counts_before_them(found):
    for process in found:
        assert process["inside"] == 0
        assert process["outside"].tolist() == [2, 2]


def test_the_mean_of_what_each_process_has_alone_fails_the_same_comparison(found, whole):
    naive = (found[0]["mean_of_means"] + found[1]["mean_of_means"]) / 2
    with pytest.raises(AssertionError, match="is off by"):
        assert_exact({"w": naive}, {"w": whole[0]["w"]})


def test_the_example_says_the_same_in_one_process_and_in_two():
    def losses(output):
        return re.findall(r"loss (\d\.\d+)", output)

    address = free_address()
    options = EXAMPLE, "--steps", 3, "--devices"
    several = ["--coordinator", address, "--processes", 2, "--process"]
    one, first, second = run_together((*options, 8), *((*options, 4, *several, process) for process in range(2)))
    assert "8 devices in 1 processes" in one
    assert "8 devices in 2 processes" in first
    assert "for each micro-batch: {}" in first
    assert losses(one) == losses(first) != []
    assert losses(second) == []
