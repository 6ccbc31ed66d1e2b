"""The floating-point rate that utilisation is measured against.

Not here: the planner's hardware table (planner/), which knows bandwidths too.
"""

from __future__ import annotations

import time
from functools import lru_cache

# Dense peak of one device in FLOP/s, as its maker states it, for bfloat16 inputs.
_BF16_PEAK = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


@lru_cache(maxsize=4)
def peak_flops(compute_dtype: str) -> tuple[float, str]:
    """Peak of all local and remote devices together, in FLOP/s, and where the number comes from.

    Accelerators are looked up by device kind; on CPUs a 2048³ matrix product is timed (0.2 s), once for the
    whole machine, since fake devices share it.
    """
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    kinds = sorted((kind for kind in _BF16_PEAK if device.device_kind.startswith(kind)), key=len)
    if kinds:
        return _BF16_PEAK[
            kinds[-1]
        ] * jax.device_count(), f"{jax.device_count()} × {kinds[-1]}, bfloat16 peak"
    n = 2048
    x = jax.device_put(jnp.ones((n, n), compute_dtype), jax.local_devices()[0])
    multiply = jax.jit(lambda a: a @ a)
    multiply(x).block_until_ready()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        multiply(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    hosts = jax.process_count()
    return 2 * n**3 / best * hosts, f"a {compute_dtype} product of 2048³ measured on this machine"
