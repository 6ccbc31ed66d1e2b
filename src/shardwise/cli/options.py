"""What every verb's options are made of: groups of fields that verbs inherit, and the rules between fields.

Not here: reading flags and YAML (parsing.py), and the options of one verb alone (that verb's file).
A field is a flag (`global_batch` is `--global-batch`) and a YAML key; the docstring under it is its help.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from shardwise.errors import CheckpointError, ConfigError, DataError

Dtype = Literal["float32", "bfloat16"]

FLOAT32_MAX = 3.4e38
"""Settings that a step computes with are float32."""
MOST_STEPS = 2**31 - 1
"""Steps are counted in int32."""


def option(default: Any = MISSING, *, metavar: str | None = None, positional: bool = False) -> Any:
    """A dataclass field that is an option of the command line.

    Args:
        default: its value when not given; none means that the option is required.
        metavar: what stands for the value in the help (`N`, `FILE`).
        positional: whether it is given by place instead of by `--name`.
    """
    return dataclasses.field(default=default, metadata={"metavar": metavar, "positional": positional})


def flag(name: str) -> str:
    """The flag of a field: `global_batch` → `--global-batch`."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Options:
    """When something goes wrong."""

    # Base of all groups. The docstring of a group describes it in `--help`.
    section: ClassVar[str] = "general"
    """Name of the group in `--help`, and of the mapping in YAML that may hold its options."""
    example: ClassVar[str] = ""
    """One complete command line for the end of `--help`; set by the verb's class."""

    debug: bool = option(False)
    """Show the full traceback of an error."""

    def __post_init__(self) -> None:
        """Refuses a value that is wrong by itself, whatever the other options are."""

    def validate(self, given: Collection[str] | None = None) -> None:
        """Refuses a combination of options in which one has no effect or contradicts another.

        Args:
            given: names of the fields that the user gave; None: those that differ from their defaults.
        Raises:
            ConfigError: with the flags concerned and the fix.
        """
        if given is None:
            fields = dataclasses.fields(self)
            given = {f.name for f in fields if getattr(self, f.name) != f.default}
        self._check_combination(frozenset(given))

    def check_paths(self) -> None:
        """Refuses input that does not exist and output that does, before any work is done."""

    def _check_combination(self, given: frozenset[str]) -> None:
        """Each group adds its rules and calls the next group's."""

    def _require_range(
        self, name: str, low: float, high: float = math.inf, *, open_low: bool = False
    ) -> None:
        value = getattr(self, name)
        if value is None:
            return
        inside = (low < value if open_low else low <= value) and value <= high and math.isfinite(value)
        if not inside:
            bounds = f"{'more than' if open_low else 'at least'} {low:,}"
            bounds += f" and at most {high:,}" if math.isfinite(high) else ""
            raise ConfigError(f"{flag(name)} is {value}; it must be {bounds}")


def refuse_without_effect(given: frozenset[str], names: Collection[str], why: str, fix: str) -> None:
    """Raises ConfigError if one of `names` was given although it does nothing here."""
    for name in names:
        if name in given:
            raise ConfigError(f"{flag(name)} has no effect {why}; {fix}, or leave {flag(name)} out")


def refuse_without_json_lines(options: Options, paths: Collection[str]) -> None:
    """Raises ConfigError if an option for JSON lines was changed although no file has any."""
    from shardwise.data.text import has_json_lines

    names = ("text_field", "on_bad_line")
    fields = {f.name: f.default for f in dataclasses.fields(options) if f.name in names}
    given = frozenset(name for name, default in fields.items() if getattr(options, name) != default)
    if given and not has_json_lines(list(paths)):
        refuse_without_effect(given, names, "without JSON lines (.jsonl)", f"{', '.join(paths)} has none")


@dataclass(frozen=True, kw_only=True)
class MeshOptions(Options):
    """Which devices, and how arrays are cut over them."""

    section: ClassVar[str] = "parallel"

    mesh: str | None = option(None, metavar="SPEC")
    """The device mesh: `dp:1,fsdp:-1,tp:2`, or the three sizes in that order, `1,-1,2`; one -1 takes what is
    left. `auto` asks the planner, in commands that run a step."""
    devices: str | None = option(None, metavar="KIND")
    """`cpu`, `cpu:8` (eight simulated devices on this machine's processor), `gpu` or `tpu`; without this
    option, what JAX finds."""
    rules: str = option("fsdp+tp", metavar="RULES")
    """How tensors are cut: `fsdp+tp`, `fsdp`, `tp`, `easylm` (EasyLM's own for LLaMA), `replicated`, or a
    YAML file of rules."""
    override: tuple[str, ...] = option((), metavar="REGEX=SPEC")
    """Cut the parameters whose path matches REGEX as SPEC says, before the rules; may be repeated."""
    head_layout: Literal["auto", "vocab", "hidden", "replicated"] = option("auto")
    """How the output head is cut over a tp above 1: across the vocabulary, across the hidden dim, or
    not; `auto` takes the cheapest for the job."""
    plan: str | None = option(None, metavar="FILE")
    """Cut everything as this plan file says; it must be for this model and mesh."""
    save_plan: str | None = option(None, metavar="FILE")
    """Write the plan to this new file."""

    def _check_combination(self, given: frozenset[str]) -> None:
        if self.plan is not None:
            names = ("rules", "override", "head_layout")
            refuse_without_effect(given, names, "with --plan, which has its own", "change the plan file")
        super()._check_combination(given)

    def check_paths(self) -> None:
        super().check_paths()
        if self.plan is not None:
            require_input("--plan", self.plan)
        if self.save_plan is not None:
            require_new("--save-plan", self.save_plan)


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(Options):
    """Several processes, one per host, that run the same command together."""

    section: ClassVar[str] = "processes"

    coordinator: str | None = option(None, metavar="HOST:PORT")
    """Where process 0 listens. The same for all processes."""
    num_processes: int | None = option(None, metavar="N")
    """How many processes take part."""
    process_id: int | None = option(None, metavar="I")
    """Which of them this is, from 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_range("num_processes", 1)
        self._require_range("process_id", 0)

    def _check_combination(self, given: frozenset[str]) -> None:
        names = ("coordinator", "num_processes", "process_id")
        missing = [flag(name) for name in names if getattr(self, name) is None]
        if 0 < len(missing) < 3:
            raise ConfigError(
                f"{' and '.join(missing)} missing: several processes need --coordinator HOST:PORT, "
                "--num-processes N and --process-id I, all three"
            )
        if not missing and not (self.process_id or 0) < (self.num_processes or 0):
            raise ConfigError(
                f"--process-id is {self.process_id}, but with --num-processes {self.num_processes} "
                f"it must be 0 to {(self.num_processes or 0) - 1}"
            )
        super()._check_combination(given)


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(Options):
    """The precision of matrix products."""

    section: ClassVar[str] = "parallel"

    compute_dtype: Dtype = option("float32")
    """Number format of the matrix products. Sums, softmax, norms and the loss are float32 either way."""


@dataclass(frozen=True, kw_only=True)
class CommonOptions(MeshOptions, PrecisionOptions, ProcessOptions):
    """What every verb that computes on a mesh takes."""

    section: ClassVar[str] = "parallel"


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """Training text."""

    section: ClassVar[str] = "input"

    data: tuple[str, ...] = option(metavar="PATH")
    """Text files (`.txt`), JSON lines (`.jsonl`), or folders of them."""
    text_field: str = option("text", metavar="NAME")
    """In JSON lines: the key that holds the text."""
    on_bad_line: Literal["error", "skip"] = option("error")
    """What to do with a line that is not JSON or has no text: stop, or skip it and report how many."""
    length: int = option(1024, metavar="N")
    """Tokens in one row; documents are packed into rows and do not see each other."""
    global_batch: int = option(8, metavar="N")
    """Rows in one optimizer step, over all devices and processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data:
            raise ConfigError("--data names no file; give at least one text file, .jsonl file or folder")
        self._require_range("length", 2)
        self._require_range("global_batch", 1)

    def check_paths(self) -> None:
        super().check_paths()
        for path in self.data:
            require_input("--data", path)
        refuse_without_json_lines(self, self.data)


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions(Options):
    """What the model learns."""

    section: ClassVar[str] = "learning"

    objective: Literal["causal", "mlm", "classify"] = option("causal")
    """`causal`: the next token. `mlm`: tokens that are hidden from it (encoders such as RoBERTa).
    `classify`: the label of each text (the same encoders; data are JSON lines with a label)."""
    mask_probability: float = option(0.15, metavar="X")
    """For `mlm`: how likely each token is to be among those that are to be found; of ten of these eight
    are hidden, one is replaced and one is left."""
    label_field: str = option("label", metavar="NAME")
    """For `classify`: the key that holds the label, a name or a number from 0."""
    pair_field: str | None = option(None, metavar="NAME")
    """For `classify`: the key that holds a second text, where the label is of two."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_range("mask_probability", 0, 1, open_low=True)

    def _check_combination(self, given: frozenset[str]) -> None:
        for objective, names in (
            ("mlm", ("mask_probability",)),
            ("classify", ("label_field", "pair_field")),
        ):
            if self.objective != objective:
                why = f"with --objective {self.objective}"
                refuse_without_effect(given, names, why, f"add --objective {objective}")
        super()._check_combination(given)


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(Options):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) and its schedule."""

    section: ClassVar[str] = "optimizer"

    steps: int | None = option(None, metavar="N")
    """Optimizer steps to train for. Give this or --epochs."""
    epochs: int | None = option(None, metavar="N")
    """Passes over the data to train for. Give this or --steps."""
    learning_rate: float = option(2e-5, metavar="X")
    """Highest learning rate, reached after the warm-up; it then falls along a cosine."""
    warmup_steps: int = option(0, metavar="N")
    """Steps in which the learning rate rises linearly from 0."""
    lr_end_ratio: float = option(0.0, metavar="X")
    """Learning rate at the last step, as a part of the highest."""
    weight_decay: float = option(0.0, metavar="X")
    """Decoupled weight decay."""
    beta1: float = option(0.9, metavar="X")
    """Decay of the running mean of gradients."""
    beta2: float = option(0.95, metavar="X")
    """Decay of the running mean of squared gradients."""
    adam_eps: float = option(1e-8, metavar="X")
    """Added to the root of the running mean of squares."""
    max_grad_norm: float = option(1.0, metavar="X")
    """Gradients with a larger global norm are scaled down to it; 0 turns this off."""
    z_loss: float = option(0.0, metavar="X")
    """Weight of the squared log-normaliser in the loss (PaLM, arXiv:2204.02311, section 5)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "epochs"):
            self._require_range(name, 1, MOST_STEPS)
        for name in ("learning_rate", "adam_eps"):
            self._require_range(name, 0, FLOAT32_MAX, open_low=True)
        for name in ("weight_decay", "max_grad_norm", "z_loss"):
            self._require_range(name, 0, FLOAT32_MAX)
        self._require_range("warmup_steps", 0, MOST_STEPS)
        self._require_range("lr_end_ratio", 0, 1)
        for name in ("beta1", "beta2"):
            self._require_range(name, 0)
            if getattr(self, name) >= 1:
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}; it must be less than 1")

    def _check_combination(self, given: frozenset[str]) -> None:
        if self.steps is None and self.epochs is None:
            raise ConfigError("how long to train? Give --steps N or --epochs N")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"--steps {self.steps} and --epochs {self.epochs} contradict; give one")
        if self.steps is not None and self.warmup_steps > self.steps:
            raise ConfigError(
                f"--warmup-steps is {self.warmup_steps}, more than --steps {self.steps}; lower it"
            )
        super()._check_combination(given)


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Options):
    """What a training step holds in memory."""

    section: ClassVar[str] = "memory"

    grad_accum_steps: int = option(1, metavar="N")
    """Split the global batch into this many parts, computed one after another, with the same gradients."""
    remat: Literal["none", "full", "dots"] = option("none")
    """What the backward pass computes again instead of keeping: nothing, whole layers, or all but the matrix
    products."""
    param_dtype: Dtype = option("float32")
    """Number format in which parameters are held and updated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_range("grad_accum_steps", 1)

    def _check_combination(self, given: frozenset[str]) -> None:
        rows: int = getattr(self, "global_batch", self.grad_accum_steps)
        if rows % self.grad_accum_steps:
            raise ConfigError(
                f"--grad-accum-steps is {self.grad_accum_steps}, which does not divide --global-batch {rows}"
            )
        super()._check_combination(given)


@dataclass(frozen=True, kw_only=True)
class OutputOptions(Options):
    """The trained model, training checkpoints and measurements."""

    section: ClassVar[str] = "output"

    out: str = option(metavar="FOLDER")
    """Write the trained model here at the end, as a Hugging Face folder. It must not exist yet."""
    checkpoint_dir: str | None = option(None, metavar="DIR")
    """Save training checkpoints here (parameters, optimizer, place in the data); always one at the end."""
    checkpoint_every: int | None = option(None, metavar="N")
    """Also save a checkpoint every N steps."""
    keep_last: int = option(2, metavar="N")
    """How many of the newest checkpoints to keep."""
    resume: bool = option(False)
    """Go on from the newest complete checkpoint in --checkpoint-dir."""
    metrics: str | None = option(None, metavar="FILE.jsonl")
    """Write one line of JSON per logged step here; default: the name of --out with `.metrics.jsonl` added."""
    log_every: int = option(1, metavar="N")
    """Log every N steps."""
    eval_data: str | None = option(None, metavar="PATH")
    """Measure the loss on this text too; always at the end."""
    eval_every: int | None = option(None, metavar="N")
    """Also measure it every N steps."""
    seed: int = option(0, metavar="N")
    """Seed of the order of the data, and of new parameters."""

    @property
    def metrics_file(self) -> str:
        """Where the metrics go."""
        return self.metrics or f"{self.out.rstrip('/')}.metrics.jsonl"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("checkpoint_every", "keep_last", "log_every", "eval_every"):
            self._require_range(name, 1)
        self._require_range("seed", 0, 2**32 - 1)

    def _check_combination(self, given: frozenset[str]) -> None:
        if self.checkpoint_dir is None:
            names = ("checkpoint_every", "keep_last", "resume")
            refuse_without_effect(given, names, "without --checkpoint-dir", "add --checkpoint-dir DIR")
        if self.eval_data is None:
            refuse_without_effect(given, ("eval_every",), "without --eval-data", "add --eval-data PATH")
        super()._check_combination(given)

    def check_paths(self) -> None:
        super().check_paths()
        if self.eval_data is not None:
            require_input("--eval-data", self.eval_data)
        require_new("--out", self.out)
        if not self.resume:
            require_new("--metrics", self.metrics_file)
        _require_can_be_made("--metrics", self.metrics_file)
        self._check_apart()
        if self.checkpoint_dir is not None:
            self._check_checkpoint_dir(Path(self.checkpoint_dir).expanduser())

    def _check_apart(self) -> None:
        """Refuses outputs that would stand in each other's way at the end of the run."""
        out = Path(self.out).expanduser().absolute()
        others = {"--metrics": self.metrics_file, "--checkpoint-dir": self.checkpoint_dir}
        for name, value in others.items():
            path = None if value is None else Path(value).expanduser().absolute()
            if path is not None and (path == out or out in path.parents):
                raise CheckpointError(
                    f"{name} {value} lies in --out {self.out}, which must not exist before the model is"
                    " written at the end; name a place outside it"
                )
        if Path(self.metrics_file).expanduser().absolute() in out.parents:
            raise CheckpointError(
                f"--out {self.out} lies below --metrics {self.metrics_file}, a file; name another place"
            )

    def _check_checkpoint_dir(self, folder: Path) -> None:
        if self.resume:
            if not folder.is_dir():
                raise CheckpointError(
                    f"--resume: folder not found: {folder}; leave --resume out to start anew"
                )
            return
        _require_can_be_made("--checkpoint-dir", str(folder / "step"))
        there = sorted(path.name for path in folder.glob("step_*"))
        if there:
            raise CheckpointError(
                f"--checkpoint-dir: {folder} holds {there[-1]} of an earlier run; add --resume to go on with"
                " that run, or name another folder"
            )


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(
    DataOptions, ObjectiveOptions, OptimizerOptions, MemoryOptions, OutputOptions, CommonOptions
):
    """What pretrain and finetune share: all but where the model and the tokenizer come from."""

    section: ClassVar[str] = "general"


def require_input(what: str, path: str) -> None:
    """Raises DataError unless `path` exists."""
    if not _exists(path):
        kind = "file" if Path(path).suffix else "file or folder"
        raise DataError(f"{what}: {kind} not found: {path}")


def require_model(path: str) -> None:
    """Raises CheckpointError if `path` must be a local model and is not there; a preset's name passes."""
    is_file = Path(path).suffix in (".gguf", ".json", ".safetensors")
    looks_local = is_file or path.startswith((".", "/")) or path.endswith("/") or path.count("/") > 1
    if looks_local and not _exists(path):
        kind = "file" if is_file else "folder"
        raise CheckpointError(f"{kind} not found: {path}")


def require_new(what: str, path: str) -> None:
    """Raises CheckpointError if `path` exists already or could not be made."""
    if _exists(path):
        raise CheckpointError(f"{what}: {path} exists already; remove it or name another one")
    _require_can_be_made(what, path)


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # a name too long, or a folder that may not be entered
        return False


def _require_can_be_made(what: str, path: str) -> None:
    """Raises CheckpointError unless `path` could be written: better now than after days of training."""
    try:
        if Path(path).is_dir():
            raise CheckpointError(f"{what}: {path} is a folder, not a file; name a file in it")
        above = next(folder for folder in Path(path).absolute().parents if folder.exists())
    except OSError as error:
        raise CheckpointError(f"{what}: {path} cannot be made: {error.strerror}; name another path") from None
    if not above.is_dir():
        raise CheckpointError(f"{what}: {path} cannot be made, because {above} is a file; name another path")
    if not os.access(above, os.W_OK):
        raise CheckpointError(f"{what}: {path} cannot be made: no permission to write to {above}")
