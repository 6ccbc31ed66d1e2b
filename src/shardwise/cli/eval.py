"""`shardwise eval`: its options; what it does is evaluation/command.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardwise.cli.options import (
    CommonOptions,
    option,
    refuse_without_effect,
    refuse_without_json_lines,
    require_input,
    require_model,
)
from shardwise.cli.startup import start
from shardwise.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EvalOptions(CommonOptions):
    """Measure how well a model predicts a text (perplexity per token), or labels of texts (accuracy)."""

    section: ClassVar[str] = "evaluation"
    example: ClassVar[str] = "shardwise eval ./SmolLM2-135M --perplexity wiki.test.txt --length 1024"

    model: str = option(metavar="MODEL", positional=True)
    """A folder of safetensors, or a .gguf file."""
    perplexity: str | None = option(None, metavar="FILE")
    """The text to predict: a text file, or .jsonl with a document in each line. Of a masked language model
    such as RoBERTa: its pseudo-perplexity, each token hidden once by itself."""
    classify: str | None = option(None, metavar="FILE.jsonl")
    """Texts to classify, each in a line of JSONL with its label: accuracy."""
    text_field: str = option("text", metavar="NAME")
    """Key that holds the document in a line of JSONL."""
    label_field: str = option("label", metavar="NAME")
    """Key that holds the label: its name, or its number."""
    pair_field: str | None = option(None, metavar="NAME")
    """Key that holds a second text, where the label is of two."""
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

    def _check_combination(self, given: frozenset[str]) -> None:
        if self.perplexity is None and self.classify is None:
            raise ConfigError("what to measure? Give --perplexity FILE, or --classify FILE.jsonl")
        if self.perplexity is not None and self.classify is not None:
            raise ConfigError("--perplexity and --classify measure different models; give one")
        if self.classify is None:
            names = ("label_field", "pair_field")
            refuse_without_effect(given, names, "without --classify", "add --classify FILE.jsonl")
        else:
            refuse_without_effect(given, ("context",), "with --classify", "a text is read whole")
        super()._check_combination(given)

    def check_paths(self) -> None:
        super().check_paths()
        require_model(self.model)
        if self.classify is not None:
            require_input("--classify", self.classify)
        elif self.perplexity is not None:
            require_input("--perplexity", self.perplexity)
            refuse_without_json_lines(self, (self.perplexity,))


def run(options: EvalOptions) -> int:
    """Measures; returns the exit code."""
    start(options)
    from shardwise.evaluation import command

    return command.run(options)
