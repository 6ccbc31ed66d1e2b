"""`shardwise plan`: its options; the work is planner/plan_command.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from shardwise.cli.options import (
    Dtype,
    Options,
    option,
    refuse_without_effect,
    require_input,
    require_model,
    require_new,
)
from shardwise.cli.startup import start
from shardwise.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """Say which mesh to take on a machine: whether the model fits, how fast each mesh is, and why.

    Predicted from the model and the machine alone; neither weights nor devices are needed.
    """

    section: ClassVar[str] = "planning"
    example: ClassVar[str] = "shardwise plan llama3-70b --on v5p-512 --batch-tokens 4M --seq 4096"

    model: str = option(metavar="MODEL", positional=True)
    """A folder of safetensors, a .gguf file, a config.json or the name of a preset."""
    on: str | None = option(None, metavar="MACHINE")
    """The machine: v5p-128, v5p:4x4x4, 2xv5e:16x16, h100:64, 8xh100x4, cpu:2; default: this one."""
    task: Literal["train", "prefill", "decode"] = option("train")
    """The step: training, reading prompts, or one new token a sequence."""
    batch: int | None = option(None, metavar="N")
    """Sequences in one step, over all devices."""
    batch_tokens: str | None = option(None, metavar="N")
    """The same in tokens, of training and prefill: 4M is 4 × 1,048,576, 512K is 512 × 1,024."""
    seq: int | None = option(None, metavar="N")
    """Tokens in a sequence (training, prefill). Default: 4,096, or the context."""
    context: int | None = option(None, metavar="N")
    """Tokens that a cache row holds (decode). Default: 8,192, or the context."""
    objective: Literal["throughput", "latency", "memory", "devices"] = option("throughput")
    """What counts: tokens a second, the time of a step, a device's memory, or the fewest devices on which
    the job fits. At a given batch the first two rank alike."""
    max_latency: str | None = option(None, metavar="TIME")
    """The longest that a step may take: 30ms, 1.5s."""
    head_layout: Literal["auto", "vocab", "hidden", "replicated"] = option("auto")
    """How the output head is cut over tp; `auto` takes the cheapest for each mesh."""
    remat: Literal["auto", "none", "dots", "full"] = option("auto")
    """What training computes again; `auto` takes the fastest that fits."""
    grad_accum_steps: int | None = option(None, metavar="N")
    """Micro-batches of a training step; default: as few as fit."""
    compute_dtype: Dtype = option("bfloat16")
    """Number format of the matrix products."""
    param_dtype: Dtype | None = option(None)
    """Number format in which parameters are held; default float32 in training, bfloat16 otherwise."""
    chips: str | None = option(None, metavar="FILE")
    """A YAML file of further chips, or of others' numbers for known ones."""
    top: int = option(8, metavar="N")
    """How many meshes to show."""
    json: str | None = option(None, metavar="FILE")
    """Write everything as JSON to this new file; `-` prints it instead of the table."""
    verify: int = option(0, metavar="K")
    """Compile the real step of the best K meshes: for TPUs with their own compiler (the extra tpu-compiler),
    which says what it takes of memory; for others on simulated devices, which tells its messages alone."""
    measure: int = option(0, metavar="K")
    """Run a few real steps of the best K meshes on the devices that are there, cpu:N included."""
    plot: str | None = option(None, metavar="FILE.png")
    """Draw memory and time of each mesh, and tokens a second against the number of devices."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch", "seq", "context", "grad_accum_steps", "top"):
            self._require_range(name, 1)
        for name in ("verify", "measure"):
            self._require_range(name, 0)
        if self.batch_tokens is not None:
            count(self.batch_tokens)
        if self.max_latency is not None:
            seconds(self.max_latency)

    def _check_combination(self, given: frozenset[str]) -> None:
        if self.batch is not None and self.batch_tokens is not None:
            raise ConfigError("--batch and --batch-tokens say the same twice; give one")
        if self.task == "decode":
            names = ("batch_tokens", "seq")
            refuse_without_effect(given, names, "with --task decode", "give --batch and --context")
        else:
            refuse_without_effect(given, ("context",), f"with --task {self.task}", "give --seq")
        if self.task != "train":
            names = ("remat", "grad_accum_steps")
            refuse_without_effect(given, names, f"with --task {self.task}", "use --task train")
        if self.measure and self.on is not None and not self.on.strip().lower().startswith("cpu"):
            raise ConfigError(
                f"--measure runs on the devices that are there; --on {self.on} names others: leave --on"
                " out, or give cpu:N"
            )
        if self.json == "-" and (self.verify or self.measure or self.plot):
            raise ConfigError(
                "--json - prints JSON alone; leave --verify, --measure and --plot out or name a file"
            )
        if self.json is not None and self.json == self.plot:
            raise ConfigError(f"--json and --plot both write {self.json}; name two files")
        super()._check_combination(given)

    def check_paths(self) -> None:
        super().check_paths()
        require_model(self.model)
        if self.chips is not None:
            require_input("--chips", self.chips)
        if self.json is not None and self.json != "-":
            require_new("--json", self.json)
        if self.plot is not None:
            require_new("--plot", self.plot)


def count(text: str) -> int:
    """A number of tokens: 4M, 512K, 2e6, 1000000.

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgG]?)", text.strip())
    if found is None or float(found[1]) == 0:
        raise ConfigError(f"--batch-tokens is {text!r}; give a number of tokens, such as 4M, 512K or 1000000")
    return round(float(found[1]) * {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}[found[2].lower()])


def seconds(text: str) -> float:
    """A time: 30ms, 1.5s, 0.03.

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|us)?", text.strip())
    if found is None or float(found[1]) == 0:
        raise ConfigError(f"--max-latency is {text!r}; give a time, such as 30ms or 1.5s")
    return float(found[1]) * {"ms": 1e-3, "us": 1e-6, "s": 1.0, None: 1.0}[found[2]]


def run(options: PlanOptions) -> int:
    """Plans; returns the exit code: 1 if nothing fits."""
    from shardwise.planner import plan_command

    if options.on is None:
        start(options)
    elif options.measure:
        plan_command.simulate(options)

    return plan_command.run(options)
