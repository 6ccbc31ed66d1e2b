"""Settings of all tests, made before JAX starts: 8 simulated devices, compile cache, no network.

Not here: fixtures of one subject; those stand in that subject's folder.
"""

from __future__ import annotations

import os
from importlib.metadata import version

# Tests use local files only; a hub look-up would be a bug, and slow where there is no network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Tests compile far more than they compute: without LLVM's optimisations and XLA's fusion emitters a training
# step on a mesh of four compiles ten times as fast. Partitioning and numbers (but for rounding) are the same.
# Set SHARDWISE_TEST_OPTIMIZED=1 to test what users run.
if not os.environ.get("SHARDWISE_TEST_OPTIMIZED"):
    quick = ["backend_optimization_level=0", "llvm_disable_expensive_passes=true"]
    if version("jaxlib").startswith("0.10."):  # later versions do not know the flag, and XLA ends on such
        quick.append("cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(
        [os.environ.get("XLA_FLAGS", ""), *(f"--xla_{flag}" for flag in quick)]
    )

from hypothesis import settings

from shardwise.runtime.compile_cache import enable_compile_cache
from shardwise.runtime.devices import configure_devices, raise_collective_timeouts

# Two test processes share the cores, so that waiting times of collectives double.
raise_collective_timeouts()
configure_devices("cpu:8")

# Compiling is most of the tests' time. JAX keys programs by content and version, and locks the folder.
enable_compile_cache()

# Examples of property tests vary in size, hence in time; in CI they must be the same each time.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
