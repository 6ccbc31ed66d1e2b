"""`shardwise convert`: its options; the work itself is checkpoints/convert.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from shardwise.cli.options import MeshOptions, option, refuse_without_effect, require_model, require_new
from shardwise.cli.startup import start


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(MeshOptions):
    """Read a model of any known format and write it as a Hugging Face folder."""

    section: ClassVar[str] = "conversion"
    example: ClassVar[str] = "shardwise convert SmolLM2-135M.gguf ./SmolLM2-135M --dtype bfloat16"

    model: str = option(metavar="MODEL", positional=True)
    """A folder of safetensors, or a .gguf file."""
    out: str = option(metavar="OUT", positional=True)
    """The folder to write. It must not exist yet."""
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = option("keep")
    """Number format of the written tensors; `keep` leaves each as it is (quantised ones become float32)."""

    def _check_combination(self, given: frozenset[str]) -> None:
        if self.mesh is None:
            refuse_without_effect(given, ("devices", "override"), "without --mesh", "add --mesh SPEC")
        super()._check_combination(given)

    def check_paths(self) -> None:
        super().check_paths()
        require_model(self.model)
        require_new("OUT", self.out)


def run(options: ConvertOptions) -> int:
    """Converts; returns the exit code."""
    start(options)
    from shardwise.checkpoints import convert

    return convert.run(options)
