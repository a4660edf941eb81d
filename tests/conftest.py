"""What every test process needs before a framework is loaded."""

import os

# Programs here run for milliseconds: time spent on optimising them is lost.
QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_force_host_platform_device_count=8",
)
os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_TO_COMPILE))
