"""The floating-point rate that utilisation is measured against.

Not here: the table of chips (chips.py).
"""

from __future__ import annotations

import time
from functools import lru_cache

from shardwise.runtime.chips import chip_of_device


@lru_cache(maxsize=4)
def peak_flops(compute_dtype: str) -> tuple[float, str]:
    """Peak of all local and remote devices together, in FLOP/s, and where the number comes from.

    Accelerators are looked up by device kind; on CPUs a 2048³ matrix product is timed (0.2 s), once for the
    whole machine, since fake devices share it.
    """
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    chip = chip_of_device(device.device_kind, device.platform)
    if chip is not None and chip.kind != "cpu":
        return (
            chip.flops("bfloat16") * jax.device_count(),
            f"{jax.device_count()} × {device.device_kind}, bfloat16 peak",
        )
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
