"""`shardwise info`: its options; the report itself is planner/info.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardwise.cli.options import MeshOptions, option, refuse_without_effect, require_model
from shardwise.cli.startup import start


@dataclass(frozen=True, kw_only=True)
class InfoOptions(MeshOptions):
    """Say what a model is made of and, for a mesh, how each tensor is cut; reads no weights.

    The mesh needs no devices, unless a size is -1 or --devices says which it must fit.
    """

    section: ClassVar[str] = "source"
    example: ClassVar[str] = "shardwise info ./SmolLM2-135M --mesh dp:1,fsdp:4,tp:2"

    model: str = option(metavar="MODEL", positional=True)
    """A folder of safetensors, a .gguf file, a config.json or the name of a preset."""

    def _check_combination(self, given: frozenset[str]) -> None:
        if self.mesh is None and self.plan is None:
            names = ("devices", "rules", "override", "head_layout", "save_plan")
            refuse_without_effect(given, names, "without --mesh", "add --mesh SPEC")
        super()._check_combination(given)

    def check_paths(self) -> None:
        super().check_paths()
        require_model(self.model)


def run(options: InfoOptions) -> int:
    """Prints the report; returns the exit code."""
    start(options)
    from shardwise.planner import info

    return info.run(options)
