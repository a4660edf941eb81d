"""What every test process needs before a framework is loaded."""

import os
import sys

import hypothesis
import pytest

hypothesis.settings.register_profile("machines may be busy", deadline=None)
hypothesis.settings.load_profile("machines may be busy")

# Programs here run for milliseconds: time spent on optimising them is lost.
QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_force_host_platform_device_count=8",
)
os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_TO_COMPILE))


@pytest.fixture
def in_this_process(monkeypatch):
    """The jobs of `wholebatch bench` are done here, and leave the frameworks as they were."""
    import torch

    from wholebatch.bench import _run
    from wholebatch.bench._worker import work

    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    double = "jax" in sys.modules and sys.modules["jax"].config.jax_enable_x64
    monkeypatch.setattr(_run, "_run", work)
    monkeypatch.setattr(_run, "threads", lambda: threads)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_enable_x64", bool(double))
