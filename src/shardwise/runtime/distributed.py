"""Several processes that form one JAX: start-up, and which of them writes files.

Not here: which rows of a batch a process reads (data/loader.py), which is a matter of the mesh.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time

from shardwise.errors import ConfigError


def initialize(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    *,
    timeout_seconds: int = 300,
) -> bool:
    """Joins the processes that run this command together; call it before JAX starts a backend.

    Args:
        coordinator: `host:port` where process 0 listens, the same for all.
        num_processes: how many processes there are.
        process_id: which of them this is, from 0.
        timeout_seconds: how long to wait for the others.
    Returns:
        Whether there are several processes; False if all three arguments are None.
    Raises:
        ConfigError: if only some are given, one is out of range, the port is taken, or nobody listens at
            `coordinator`. If that is reached but some processes do not come, this one ends with exit code 2
            and a line on stderr: JAX would end it with a C++ stack trace, and leaves no way to raise.
    """
    if coordinator is None and num_processes is None and process_id is None:
        return False
    if coordinator is None or num_processes is None or process_id is None:
        raise ConfigError(
            "several processes need --coordinator HOST:PORT, --num-processes N and --process-id I, all three;"
            f" got {coordinator}, {num_processes}, {process_id}"
        )
    if not 0 <= process_id < num_processes:
        raise ConfigError(
            f"--process-id is {process_id}; it must be 0 to {num_processes - 1} (--num-processes)"
        )
    host, port = _host_and_port(coordinator)
    if process_id == 0:
        _require_free(port)
    else:
        _await_coordinator(host, port, timeout_seconds)
    import jax

    # Only matters where the processor computes: its other collectives cannot leave the process.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    text = (
        f"error: process {process_id} of {num_processes}: not all processes came to {coordinator} within "
        f"{timeout_seconds} s; check that all {num_processes} run, each with its own --process-id"
    )
    watchdog = threading.Timer(timeout_seconds, _end_process, [text])
    watchdog.daemon = True
    watchdog.start()
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=num_processes,
            process_id=process_id,
            initialization_timeout=timeout_seconds + 60,
        )
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"process {process_id} of {num_processes} could not join at {coordinator}: {reason}"
        ) from error
    finally:
        watchdog.cancel()
    return True


def is_main_process() -> bool:
    """Whether this process writes files and messages for all: process 0. Starts JAX if it has not started."""
    import jax

    return jax.process_index() == 0


def _host_and_port(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"--coordinator '{coordinator}': expected HOST:PORT with a port from 1 to 65535")
    return host.strip("[]"), int(port)


def _await_coordinator(host: str, port: int, timeout_seconds: float) -> None:
    """Waits until somebody listens at host:port; raises ConfigError after `timeout_seconds`."""
    end = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, end - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() + 0.2 > end:
                raise ConfigError(
                    f"--coordinator: nobody listens at {host}:{port} after {timeout_seconds:g} s "
                    f"({error.strerror or error}); start process 0 there, and check the address"
                ) from error
        time.sleep(0.2)


def _end_process(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    os._exit(2)


def _require_free(port: int) -> None:
    """Raises ConfigError if nobody could listen on `port` here; JAX itself would end the process."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the coordinator does: a port whose last connection is only just closed counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            why = {errno.EADDRINUSE: "is in use by another program", errno.EACCES: "needs more rights"}
            text = why.get(error.errno or 0, str(error))
            raise ConfigError(f"--coordinator: port {port} {text}; choose another one") from error
