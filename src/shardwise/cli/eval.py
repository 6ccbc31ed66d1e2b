"""`shardwise eval`: its options; the measuring itself is evaluation/perplexity.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardwise.cli.options import (
    CommonOptions,
    option,
    refuse_without_json_lines,
    require_input,
    require_model,
)
from shardwise.cli.startup import start
from shardwise.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EvalOptions(CommonOptions):
    """Measure how well a model predicts a text: perplexity per token."""

    section: ClassVar[str] = "evaluation"
    example: ClassVar[str] = "shardwise eval ./SmolLM2-135M --perplexity wiki.test.txt --length 1024"

    model: str = option(metavar="MODEL", positional=True)
    """A folder of safetensors, or a .gguf file."""
    perplexity: str = option(metavar="FILE")
    """The text to predict: a text file, or .jsonl with a document in each line."""
    text_field: str = option("text", metavar="NAME")
    """Key that holds the document in a line of JSONL."""
    length: int = option(1024, metavar="N")
    """Tokens in one window."""
    batch: int = option(8, metavar="N")
    """Windows computed at a time; it does not change the result."""
    context: int = option(1, metavar="N")
    """How many tokens at the start of a window only serve as context for the others and are not scored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_range("length", 2)
        self._require_range("batch", 1)
        self._require_range("context", 1)
        if self.context >= self.length:
            raise ConfigError(f"--context is {self.context}; it must be less than --length {self.length}")

    def check_paths(self) -> None:
        super().check_paths()
        require_model(self.model)
        require_input("--perplexity", self.perplexity)
        refuse_without_json_lines(self, (self.perplexity,))


def run(options: EvalOptions) -> int:
    """Measures; returns the exit code."""
    start(options)
    from shardwise.evaluation import perplexity

    return perplexity.run(options)
