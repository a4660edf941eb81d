"""Importing costs little and changes nothing."""

import json
import subprocess
import sys

import pytest

import wholebatch

LOADED_AND_CHANGED = """
import json, os, sys, warnings
environment, filters = dict(os.environ), list(warnings.filters)
import {module}
changed = [name for name in os.environ if environment.get(name) != os.environ[name]]
print(json.dumps({{"modules": sorted({{name.partition(".")[0] for name in sys.modules}}), "environment": changed}}))
"""

# Its own time, so that a busy machine does not change the answer.
TIMED = """
import time
start = time.process_time()
import wholebatch
print(time.process_time() - start)
"""


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def loaded_by(module: str) -> dict:
    ran = run(LOADED_AND_CHANGED.format(module=module))
    assert ran.stderr == ""
    assert ran.stdout.count("\n") == 1, "nothing is printed on import"
    return json.loads(ran.stdout)


def test_the_core_loads_no_framework():
    found = loaded_by("wholebatch")
    assert not {"torch", "jax", "numpy"} & set(found["modules"])
    assert found["environment"] == []


def test_the_torch_front_end_loads_only_its_own():
    pytest.importorskip("torch")
    modules = set(loaded_by("wholebatch.torch")["modules"])
    assert "torch" in modules
    assert not {"jax", "flax", "transformers"} & modules


def test_the_core_loads_no_module_that_costs_more_than_itself():
    assert "dataclasses" not in loaded_by("wholebatch")["modules"]


def test_the_jax_front_end_loads_only_its_own():
    pytest.importorskip("jax")
    found = loaded_by("wholebatch.jax")
    assert "jax" in found["modules"]
    assert not {"torch", "flax", "optax", "equinox"} & set(found["modules"])
    assert found["environment"] == []


def test_importing_the_core_takes_under_50_ms():
    assert min(float(run(TIMED).stdout) for _ in range(5)) < 0.05


def test_public_names_exist_and_are_listed():
    assert wholebatch.__all__ == sorted(wholebatch.__all__, key=str)
    for name in wholebatch.__all__:
        assert getattr(wholebatch, name) is not None
    public = {name for name, value in vars(wholebatch).items() if isinstance(value, type)}
    assert public == {name for name in wholebatch.__all__ if name != "__version__"}
