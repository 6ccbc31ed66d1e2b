"""A tiny model, a little text, and `shardwise finetune` in this process: tests share compiled steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import read_metrics, write_jsonl, write_llama

from shardwise.cli.main import main

# C319 asks for warm-up 3 and cosine to 0 over 10 steps; all tests keep to it, so that they share one program.
COMMON = {
    "length": 16, "global-batch": 8, "steps": 10, "warmup-steps": 3, "learning-rate": 1e-2, "mesh": "1,4,2",
}  # fmt: skip


@dataclass(frozen=True)
class Site:
    """Where commands of a test run."""

    model: Path
    data: Path
    folder: Path
    """For what a test writes."""

    def finetune(self, name: str, *flags: str, model: Path | None = None, **changes: Any) -> int:
        """Run `shardwise finetune` into `<folder>/<name>`, metrics in `<name>.jsonl`; returns the exit code.

        Args:
            flags: more arguments.
            changes: options to set (data, length, …); None leaves one out.
        """
        options = {
            "data": self.data, "out": self.folder / name, "metrics": self.folder / f"{name}.jsonl",
            **COMMON, **{key.replace("_", "-"): value for key, value in changes.items()},
        }  # fmt: skip
        given = [
            word for key, value in options.items() if value is not None for word in (f"--{key}", str(value))
        ]
        return main(["finetune", str(model or self.model), *given, *flags])

    def pretrain(self, name: str, *flags: str) -> int:
        """Run `shardwise pretrain` with the model's config and tokenizer and the same steps as `finetune`."""
        options = {
            "tokenizer": self.model, "data": self.data, "out": self.folder / name, "weight-decay": 0.0,
            "metrics": self.folder / f"{name}.jsonl", **COMMON,
        }  # fmt: skip
        given = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        return main(["pretrain", str(self.model / "config.json"), *given, *flags])

    def steps(self, name: str) -> list[dict[str, Any]]:
        """The records of training steps (not of evaluations) of a run's metrics."""
        return [record for record in read_metrics(self.folder / f"{name}.jsonl") if "loss" in record]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model folder and a JSONL file of 13 documents, both never written to."""
    folder = tmp_path_factory.mktemp("tiny")
    return write_llama(folder / "model"), write_jsonl(folder / "data.jsonl")


@pytest.fixture
def site(tiny: tuple[Path, Path], tmp_path: Path) -> Site:
    return Site(*tiny, tmp_path)
