"""`shardwise info`: its options; the report itself is planner/info.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardwise.cli.options import Options, option, require_model
from shardwise.cli.startup import start


@dataclass(frozen=True, kw_only=True)
class InfoOptions(Options):
    """Say what a model is made of; reads no weights. How a mesh cuts it is `shardwise explain`."""

    section: ClassVar[str] = "source"
    example: ClassVar[str] = "shardwise info ./SmolLM2-135M"

    model: str = option(metavar="MODEL", positional=True)
    """A folder of safetensors, a .gguf file, a config.json or the name of a preset."""

    def check_paths(self) -> None:
        super().check_paths()
        require_model(self.model)


def run(options: InfoOptions) -> int:
    """Prints the report; returns the exit code."""
    start(options)
    from shardwise.planner import info

    return info.run(options)
