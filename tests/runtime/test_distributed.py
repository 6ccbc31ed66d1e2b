"""Several processes become one JAX; what prevents it is said in one line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.runtime import distributed

WORKER = """
import sys
from shardwise.runtime import devices, distributed
devices.configure_devices("cpu:2")
coordinator, count, index, timeout = sys.argv[1], *map(int, sys.argv[2:])
assert distributed.initialize(coordinator, count, index, timeout_seconds=timeout)
import jax
import numpy as np
from jax.experimental import multihost_utils
total = multihost_utils.process_allgather(np.array([index + 1])).sum()
print("RESULT", jax.device_count(), total, distributed.is_main_process(), flush=True)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_worker(port: int, index: int, timeout: int) -> subprocess.Popen[str]:
    arguments = [f"127.0.0.1:{port}", "2", str(index), str(timeout)]
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, *arguments],
        env=os.environ | {"PYTHONPATH": str(Path(distributed.__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_nothing_given_is_one_process() -> None:
    assert distributed.initialize(None, None, None) is False
    assert distributed.is_main_process()


@pytest.mark.parametrize(
    "given",
    [("h:1", None, None), (None, 2, None), (None, None, 0), ("h:1", 2, None), (None, 2, 0), ("h:1", None, 0)],
)
def test_all_three_or_none_must_be_given(given: tuple[str | None, int | None, int | None]) -> None:
    with pytest.raises(ConfigError, match="--coordinator HOST:PORT, --num-processes N and --process-id I"):
        distributed.initialize(*given)


@pytest.mark.parametrize("index", [-1, 2])
def test_process_id_must_be_below_num_processes(index: int) -> None:
    with pytest.raises(ConfigError, match="must be 0 to 1"):
        distributed.initialize("localhost:1234", 2, index)


@pytest.mark.parametrize(
    "coordinator", ["localhost", "localhost:", ":1234", "localhost:x", "localhost:0", "h:65536"]
)
def test_coordinator_must_be_host_and_port(coordinator: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        distributed.initialize(coordinator, 2, 0)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use by another program"):
            distributed.initialize(f"127.0.0.1:{port}", 2, 0)


def test_an_absent_coordinator_is_named() -> None:
    with pytest.raises(ConfigError, match="nobody listens at 127.0.0.1:"):
        distributed.initialize(f"127.0.0.1:{free_port()}", 2, 1, timeout_seconds=1)


def test_two_processes_compute_together_and_one_is_main() -> None:
    port = free_port()
    workers = [start_worker(port, index, 90) for index in (0, 1)]
    outputs = [worker.communicate(timeout=120) for worker in workers]
    for index, (out, err) in enumerate(outputs):
        assert f"RESULT 4 3 {index == 0}" in out, err


def test_a_process_that_never_comes_is_reported_without_a_stack_trace() -> None:
    worker = start_worker(free_port(), 0, 3)
    _, err = worker.communicate(timeout=120)
    assert worker.returncode == 2
    assert "process 0 of 2: not all processes came" in err
    assert "Traceback" not in err
    assert "PyObject" not in err
