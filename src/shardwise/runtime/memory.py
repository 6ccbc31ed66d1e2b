"""Memory of this process: how malloc keeps freed blocks, and how much is in use.

Not here: memory of accelerators, which JAX's own device statistics give.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Mapping

# From glibc's malloc.h; mallopt has no other interface.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

# mallopt takes a C int, so 2 GiB - 1 is the most that can be said (GLIBC_TUNABLES could say more).
_INT_MAX = 2**31 - 1
_GIB = 2**30


def tune_malloc(
    *,
    mmap_threshold: int = _GIB,
    trim_threshold: int = _INT_MAX,
    arena_max: int | None = 1,
    environ: Mapping[str, str] | None = None,
) -> bool:
    """Makes glibc's malloc keep large freed blocks instead of returning them to the kernel.

    XLA on a CPU allocates its large temporaries anew each step; fetched by mmap, every page of them faults
    again, which can cost a third of a training step. Call it before JAX starts. It does nothing elsewhere
    than on Linux with glibc, or if the environment has SHARDWISE_NO_MALLOC_TUNING=1 or GLIBC_TUNABLES for
    malloc.

    Args:
        mmap_threshold: bytes; blocks below come from the heap, which keeps them (at most 2**31 - 1). Larger
            ones go back to the kernel when freed: kept, a small block put into the hole they leave makes the
            next one of the size lengthen the heap (a training step with 2 GB of temporaries was 14 % faster
            so, but its process grew to two or three times the memory, differently in each run).
        trim_threshold: bytes; free memory at the heap's end that is kept (at most 2**31 - 1).
        arena_max: number of heaps for threads; None leaves glibc's choice. Heaps of threads other than the
            main one hold at most 64 MiB, so that XLA's larger buffers would be mapped anew each time: one
            heap for all.
        environ: for tests; None is os.environ.
    Returns:
        Whether all settings were made.
    """
    environ = os.environ if environ is None else environ
    if environ.get("SHARDWISE_NO_MALLOC_TUNING", "") not in ("", "0"):
        return False
    if "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return False
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = [(_M_MMAP_THRESHOLD, mmap_threshold), (_M_TRIM_THRESHOLD, trim_threshold)]
    if arena_max is not None:
        settings.append((_M_ARENA_MAX, arena_max))
    accepted = [mallopt(name, min(value, _INT_MAX)) == 1 for name, value in settings]
    return all(accepted)


def anonymous_rss_bytes() -> int | None:
    """Resident memory of this process that no file backs, in bytes (memory maps of weights do not count).

    Returns:
        RssAnon of /proc/self/status; None where the system does not have it.
    """
    return _status_bytes("RssAnon")


def peak_rss_bytes() -> int | None:
    """The most resident memory that this process ever had, in bytes, memory maps included.

    Returns:
        VmHWM of /proc/self/status; elsewhere the resource module's figure, and None without either.
    """
    peak = _status_bytes("VmHWM")
    if peak is not None:
        return peak
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status_bytes(key: str) -> int | None:
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            for line in lines:
                if line.startswith(key + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
