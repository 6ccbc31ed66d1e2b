"""Memory is measured without counting mapped files; malloc is tuned only where that can be done."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardwise.runtime import memory

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status exists on Linux only")
MIB = 1 << 20


@linux_only
def test_anonymous_memory_counts_arrays_but_not_mapped_files(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"\1" * (64 * MIB))
    before = memory.anonymous_rss_bytes()
    assert before is not None
    mapped = np.memmap(tmp_path / "weights", dtype=np.uint8, mode="r")
    assert mapped.sum(dtype=np.int64) == 64 * MIB
    after_map = memory.anonymous_rss_bytes()
    # mapped by hand: malloc may answer from memory that an earlier test has freed
    array = np.frombuffer(mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    array[:] = 1
    after_array = memory.anonymous_rss_bytes()
    assert after_map is not None
    assert after_array is not None
    assert after_map - before < 16 * MIB
    assert after_array - after_map > 48 * MIB
    assert array[-1] == 1


@linux_only
def test_peak_memory_is_at_least_what_was_held() -> None:
    block = np.ones(64 * MIB, np.uint8)
    held = memory.anonymous_rss_bytes()
    del block
    peak = memory.peak_rss_bytes()
    assert held is not None
    assert peak is not None
    # The kernel keeps both counts per thread and adds them up late: up to 64 pages a thread are missing.
    assert peak > held - 16 * MIB


@pytest.mark.parametrize(
    "environ", [{"SHARDWISE_NO_MALLOC_TUNING": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}]
)
def test_malloc_stays_as_it_is_if_the_environment_says_so(environ: dict[str, str]) -> None:
    assert memory.tune_malloc(environ=environ) is False


def test_malloc_stays_as_it_is_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.platform, "libc_ver", lambda: ("", ""))
    assert memory.tune_malloc(environ={}) is False


@linux_only
@pytest.mark.skipif(memory.platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_tuned_malloc_reuses_a_large_block_without_new_page_faults() -> None:
    code = """
import ctypes, resource, sys
from shardwise.runtime import memory
if sys.argv[1] == "tuned":
    assert memory.tune_malloc(environ={}, arena_max=1)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def touch():
    block = libc.malloc(256 << 20)
    ctypes.memset(block, 1, 256 << 20)
    libc.free(block)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    source = str(Path(memory.__file__).parents[2])
    faults = {
        how: int(
            subprocess.run(
                [sys.executable, "-c", code, how], env={"PYTHONPATH": source}, capture_output=True, check=True
            ).stdout
        )
        for how in ("plain", "tuned")
    }
    # 256 MiB are 65,536 pages of 4 KiB, or 128 of 2 MiB where the kernel gives huge ones.
    assert faults["plain"] >= 128
    assert faults["tuned"] < 32
