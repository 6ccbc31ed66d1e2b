"""Starts commands as one process with two devices or as two with one each; they end by themselves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.cli import main as main_module

SOURCE = str(Path(main_module.__file__).parents[2])
SECONDS = 240
"""Two processes that compile on two shared cores take half a minute; this is only for a hang."""

COMMAND = ("-m", "shardwise.cli.main")


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str


def run_one(arguments: Sequence[str], *, program: Sequence[str] = COMMAND) -> Ended:
    """One process with two devices."""
    return _wait([_start([*program, *arguments, "--devices", "cpu:2"])])[0]


def run_two(
    arguments: Sequence[str], *, program: Sequence[str] = COMMAND, own: Sequence[Sequence[str]] = ((), ())
) -> list[Ended]:
    """Two processes with one device each.

    Args:
        own: more arguments for each of them.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for number in range(2):
        place = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id", str(number)]
        started.append(_start([*program, *arguments, *own[number], "--devices", "cpu:1", *place]))
    return _wait(started)


def _start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait(processes: list[subprocess.Popen[str]]) -> list[Ended]:
    """What they said; after SECONDS those of them that still run are killed, and no others."""
    try:
        ended = []
        for process in processes:
            out, err = process.communicate(timeout=SECONDS)
            ended.append(Ended(process.returncode, out, err))
        return ended
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
