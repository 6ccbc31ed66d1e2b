"""`shardwise generate`: its options; the work itself is generation's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardwise.cli.options import CommonOptions, option, refuse_without_effect, require_model
from shardwise.cli.startup import start
from shardwise.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(CommonOptions):
    """Continue prompts, or answer them as a chat assistant."""

    section: ClassVar[str] = "generation"
    example: ClassVar[str] = "shardwise generate ./SmolLM2-135M-Instruct --chat 'Why is the sky blue?'"

    model: str = option(metavar="MODEL", positional=True)
    """A folder of safetensors, or a .gguf file."""
    prompt: tuple[str, ...] = option(metavar="PROMPT", positional=True)
    """One or more texts; all are computed together."""
    chat: bool = option(False)
    """Wrap each prompt in the model's chat template, as a message from the user."""
    max_new_tokens: int = option(64, metavar="N")
    """Stop after this many new tokens."""
    temperature: float = option(0.0, metavar="X")
    """0 takes the likeliest token each time; higher values draw more freely."""
    top_k: int = option(0, metavar="N")
    """Draw only among the N likeliest tokens; 0: among all."""
    top_p: float = option(1.0, metavar="X")
    """Draw only among the likeliest tokens that together have this probability, of those that top_k left."""
    min_p: float = option(0.0, metavar="X")
    """Draw only among tokens at least X times as likely as the likeliest, of those left by top_p; 0: all."""
    seed: int = option(0, metavar="N")
    """Seed of the drawing."""
    stop_token: tuple[str, ...] = option((), metavar="TOKEN")
    """Also stop at this token, besides the model's own; may be repeated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompt:
            raise ConfigError("no PROMPT given; add one or more texts after MODEL")
        self._require_range("max_new_tokens", 1)
        self._require_range("temperature", 0)
        self._require_range("top_k", 0)
        self._require_range("top_p", 0, 1, open_low=True)
        self._require_range("min_p", 0, 1)
        self._require_range("seed", 0, 2**32 - 1)

    def _check_combination(self, given: frozenset[str]) -> None:
        if self.temperature == 0:
            names = ("top_k", "top_p", "min_p", "seed")
            why = "with --temperature 0, which always takes the likeliest token"
            refuse_without_effect(given, names, why, "add --temperature 1 (or another above 0)")
        super()._check_combination(given)

    def check_paths(self) -> None:
        super().check_paths()
        require_model(self.model)


def run(options: GenerateOptions) -> int:
    """Generates; returns the exit code."""
    start(options)
    from shardwise.serving import command as generation

    return generation.run(options)
