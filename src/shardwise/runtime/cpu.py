"""What this machine's processor can do. Not here: accelerators, which JAX describes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


@cache
def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has bfloat16 dot products (x86: AVX-512 BF16 or AMX; Arm: BF16).

    Args:
        cpuinfo: the kernel's description of the processors.

    Returns:
        False also where the system has no such file: products are then made in float32, which is exact.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = {
        flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()
    }
    return bool(flags & _BFLOAT16_FLAGS)
