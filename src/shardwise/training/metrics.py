"""What training tells: a progress line for people, one JSON line a step for programs.

Not here: what is measured on the devices (steps/train.py).
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from shardwise.errors import ConfigError


class Reporter:
    """Shows progress and writes metrics; silent on all processes but the first.

    Args:
        total: steps of the whole run.
        done: steps before this run.
        file: JSONL file to append to. What it holds of steps after `done` is removed: those of an interrupted
            run, since its last checkpoint, are about to be done again.
        flops_per_token: of training, for MFU.
        peak: FLOP/s of all devices together.
    """

    def __init__(
        self, total: int, done: int, file: str | Path | None, flops_per_token: float, peak: float, quiet: bool
    ):
        self._console = Console(stderr=True, quiet=quiet)
        self._flops_per_token, self._peak = flops_per_token, peak
        self._file = None if file is None or quiet else _open_after(Path(file), done)
        columns = (
            TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(),
            TextColumn("{task.fields[say]}"), TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(),
        )  # fmt: skip
        self._progress = Progress(*columns, console=self._console, disable=quiet)
        self._task = self._progress.add_task("train", total=total, completed=done, say="compiling …")
        self._last = time.perf_counter()
        self._plain = not self._console.is_terminal and not quiet

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._file:
            self._file.close()

    def restart_clock(self) -> None:
        """Leave the time since the last step (an evaluation, a checkpoint) out of the next step's rate."""
        self._last = time.perf_counter()

    def step(self, number: int, metrics: dict[str, float], batch_tokens: int, steps: int = 1) -> None:
        """Report one logged step.

        Args:
            metrics: loss, trained tokens, gradient norm, learning rate.
            batch_tokens: places in the batches of the steps since the last report, padding and all.
            steps: how many steps that were.
        """
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        rate = batch_tokens / seconds
        mfu = rate * self._flops_per_token / self._peak
        record: dict[str, Any] = {
            "step": number, "loss": metrics["loss"], "trained_tokens": int(metrics["tokens"]),
            "grad_norm": metrics["grad_norm"], "learning_rate": metrics["learning_rate"],
            "tokens_per_second": rate, "mfu": mfu, "seconds": seconds,
        }  # fmt: skip
        skipped = metrics["tokens"] == 0
        if skipped:
            record["loss"] = None
            record["skipped"] = "no trained token in this batch"
        self.write(record)
        loss = "skipped (no trained token)" if skipped else f"loss {metrics['loss']:.4f}"
        say = f"{loss}  {rate:,.0f} tokens/s  MFU {mfu:.1%}"
        self._progress.update(self._task, completed=number, say=say)
        if self._plain:
            self._console.print(f"step {number}  {say}", highlight=False)

    def write(self, record: dict[str, Any]) -> None:
        """Append one JSON line, at once."""
        if self._file:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def say(self, text: str) -> None:
        """A line above the progress bar."""
        self._console.print(text, highlight=False, soft_wrap=True)


def _open_after(path: Path, done: int) -> TextIO:
    """Open a metrics file for appending behind its records of steps up to `done`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if _step_of(line) <= done]
        if kept != lines:
            new = path.with_name(f".{path.name}.new")
            new.write_text("".join(kept), encoding="utf-8")
            new.replace(path)
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--metrics: {path} cannot be written: {error.strerror}") from error


def _step_of(line: str) -> float:
    """The step of a record; infinite for a line that a kill cut short."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf
