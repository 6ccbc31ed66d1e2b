"""`shardwise explain`: its options; the work is planner/explain_command.py."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from shardwise.cli.options import (
    MemoryOptions,
    MeshOptions,
    PrecisionOptions,
    flag,
    option,
    refuse_without_effect,
    require_input,
    require_model,
    require_new,
)
from shardwise.cli.startup import start
from shardwise.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(MeshOptions, PrecisionOptions, MemoryOptions):
    """Say how a mesh cuts every tensor of a model, why, and what that costs; from shapes alone.

    Needs neither weights nor devices. With --audit the real step is compiled on simulated devices, and what
    the compiler made of it stands beside the prediction.
    """

    section: ClassVar[str] = "explanation"
    example: ClassVar[str] = "shardwise explain llama3-70b --mesh dp:1,fsdp:64,tp:8 --batch 64 --seq 4096"

    model: tuple[str, ...] = option(metavar="MODEL", positional=True)
    """A folder of safetensors, a .gguf file, a config.json or the name of a preset; two plan files with
    --diff."""
    task: Literal["train", "prefill", "decode", "score"] = option("train")
    """The step: training, adding a prompt to the cache, one new token a sequence, or scoring a text."""
    batch: int | None = option(None, metavar="N")
    """Sequences in one step, over all devices; default: one for each device that splits the batch."""
    seq: int | None = option(None, metavar="N")
    """Tokens in a sequence; in `decode` those that the cache holds. Default: 2,048, or the context."""
    choose: Literal["greedy", "sample", "logits"] = option("greedy")
    """What `prefill` and `decode` hand back."""
    tensor: str | None = option(None, metavar="REGEX")
    """Show the tensors whose path matches in full, and draw how they lie on the devices."""
    swap: str | None = option(None, metavar="PATH[:AXIS]")
    """Put a mesh axis (tp, or the only one) of this tensor on another dim, and show both side by side."""
    audit: bool = option(False)
    """Compile the step on simulated devices and compare."""
    json: str | None = option(None, metavar="FILE")
    """Write everything as JSON to this new file; `-` prints it instead of the tables."""
    diff: bool = option(False)
    """Tell two plan files apart."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_range("batch", 1)
        self._require_range("seq", 1)
        if len(self.model) != (2 if self.diff else 1):
            wanted = "two plan files" if self.diff else "one MODEL"
            raise ConfigError(f"explain takes {wanted}{' with --diff' if self.diff else ''}, got"
                              f" {len(self.model)}: {' '.join(self.model)}")  # fmt: skip
        if self.tensor is not None:
            try:
                re.compile(self.tensor)
            except re.error as error:
                raise ConfigError(f"--tensor {self.tensor!r} is no regular expression: {error}") from None

    def _check_combination(self, given: frozenset[str]) -> None:
        if self.diff:
            others = tuple(name for name in given if name not in ("diff", "model", "debug", "config"))
            refuse_without_effect(frozenset(others), others, "with --diff", "give the two files alone")
            return
        if self.mesh is None and self.plan is None:
            raise ConfigError("explain needs --mesh SPEC, such as dp:1,fsdp:4,tp:2, or --plan FILE")
        if self.task not in ("prefill", "decode"):
            refuse_without_effect(given, ("choose",), f"with --task {self.task}", "use --task decode")
        if self.task != "train":
            names = ("remat", "grad_accum_steps")
            refuse_without_effect(given, names, f"with --task {self.task}", "use --task train")
        if self.tensor is not None and self.swap is not None:
            raise ConfigError("--tensor and --swap show one thing each; leave one of them out")
        if self.json is not None and self.json == self.save_plan:
            raise ConfigError(f"--json and --save-plan both write {self.json}; name two files")
        if self.json == "-":
            for name in ("tensor", "swap", "audit"):
                if name in given:
                    raise ConfigError(f"--json - prints JSON alone; leave {flag(name)} out or name a file")
        if self.devices is not None and not self.needs_devices:
            raise ConfigError(
                "--devices has no effect with explain unless a size of --mesh is -1; leave it out"
            )
        super()._check_combination(given)

    @property
    def needs_devices(self) -> bool:
        """Whether the mesh is to be fitted to devices."""
        return self.mesh is not None and "-1" in self.mesh

    def check_paths(self) -> None:
        super().check_paths()
        if self.diff:
            for path in self.model:
                require_input("--diff", path)
        else:
            require_model(self.model[0])
        if self.json is not None and self.json != "-":
            require_new("--json", self.json)


def run(options: ExplainOptions) -> int:
    """Explains; returns the exit code."""
    from shardwise.planner import explain_command

    if options.diff:
        return explain_command.diff(*options.model)
    start(options if options.needs_devices else replace(options, devices=_simulated(options)))
    return explain_command.run(options)


def _simulated(options: ExplainOptions) -> str:
    """Simulated devices for the audit, one otherwise: no accelerator is woken for a plan."""
    from shardwise.planner.choose import asked_mesh
    from shardwise.runtime.devices import running_processors

    if not options.audit:
        return "cpu"
    mesh = asked_mesh(options)
    assert mesh is not None, "explain needs a mesh or a plan file"
    running = running_processors()  # more than 0 where a program, not the command line, calls
    return f"cpu:{running if running >= mesh.num_devices else mesh.num_devices}"
