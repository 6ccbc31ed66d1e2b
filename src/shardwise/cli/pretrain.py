"""`shardwise pretrain`: its options; the training itself is training/jobs.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardwise.cli.options import TrainingOptions, option, require_model
from shardwise.cli.startup import start


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(TrainingOptions):
    """Train a new model from random parameters, and write it as a Hugging Face folder."""

    section: ClassVar[str] = "source"
    example: ClassVar[str] = (
        "shardwise pretrain config.json --tokenizer ./SmolLM2-135M --data c.jsonl --steps 1000 --out ./new"
    )

    model: str = option(metavar="PRESET|CONFIG", positional=True)
    """The shape of the new model: the name of a preset, or a Hugging Face config.json."""
    tokenizer: str = option(metavar="PATH")
    """A folder or .gguf file whose tokenizer to use."""
    learning_rate: float = option(3e-4, metavar="X")
    """Highest learning rate, reached after the warm-up; it then falls along a cosine."""
    weight_decay: float = option(0.1, metavar="X")
    """Decoupled weight decay."""

    def check_paths(self) -> None:
        require_model(self.model)
        require_model(self.tokenizer)
        super().check_paths()


def run(options: PretrainOptions) -> int:
    """Trains; returns the exit code."""
    start(options)
    from shardwise.training import jobs

    return jobs.pretrain(options)
