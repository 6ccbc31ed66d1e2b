"""`shardwise finetune`: its options; the training itself is training/jobs.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardwise.cli.options import TrainingOptions, option, require_model
from shardwise.cli.startup import start


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TrainingOptions):
    """Train a model further on your own text, on any mesh, and write it as a Hugging Face folder."""

    section: ClassVar[str] = "source"
    example: ClassVar[str] = (
        "shardwise finetune ./SmolLM2-135M --data notes.txt --epochs 1 --length 512 --out ./tuned"
    )

    model: str = option(metavar="MODEL", positional=True)
    """The model to start from: a folder of safetensors, or a .gguf file."""

    def check_paths(self) -> None:
        require_model(self.model)
        super().check_paths()


def run(options: FinetuneOptions) -> int:
    """Trains; returns the exit code."""
    start(options)
    from shardwise.training import jobs

    return jobs.finetune(options)
