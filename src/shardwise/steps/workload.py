"""What a step is asked to do: task, sizes, dtypes and options, as one hashable value.

Imports no JAX. Not here: the step itself (build.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.partition.padding import round_up
from shardwise.partition.plan import Plan
from shardwise.steps.optimizer import OptimizerConfig

Task = Literal["train", "score", "logits", "hidden", "prefill", "decode"]


@dataclass(frozen=True)
class Workload:
    """One compiled step's job."""

    task: Task
    """`train`: loss, gradients, update. `score`: NLL of given targets, and likeliest ids. `logits`: all
    logits of whole sequences. `hidden`: their last hidden states, without a head. `prefill`: add T tokens a
    row to the cache and choose the next. `decode`: the same for one token a row."""
    batch: int
    """B: sequences over all devices."""
    length: int
    """T: tokens a sequence (1 for `decode`)."""
    capacity: int = 0
    """S: tokens that a cache row holds (`prefill`, `decode`)."""
    compute_dtype: str = "float32"
    """Of activations and of weights at use."""
    param_dtype: str = "float32"
    """Of parameters, gradients and optimizer state."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass recomputes."""
    grad_accum_steps: int = 1
    """Micro-batches that a training step runs one after the other."""
    z_loss: float = 0.0
    """Coefficient of the log-partition penalty in training."""
    optimizer: OptimizerConfig | None = None
    """Needed by `train`."""
    choose: Literal["greedy", "sample", "logits"] = "greedy"
    """What `prefill` and `decode` return: likeliest ids, ids drawn by SamplingParams, or the last logits."""
    top_n: int = 0
    """`score` also lists this many of the likeliest ids at every position, with their log-probabilities."""
    kernel: Literal["auto", "xla", "tokamax"] = "auto"
    """Attention kernel."""

    @property
    def trained_by(self) -> OptimizerConfig:
        """`optimizer`, for the steps that cannot do without."""
        assert self.optimizer is not None, "training needs an optimizer"
        return self.optimizer

    def followed(self, plan: Plan) -> Plan:
        """The plan as this step follows it: for its number of tokens a row (Plan.at_length).

        Raises:
            ConfigError: sizes that do not fit the plan.
        """
        self.check(plan)
        return plan.at_length(self.length)

    def check(self, plan: Plan) -> None:
        """Raise ConfigError when the sizes do not fit the plan's mesh."""
        self._check_model(plan.config)
        multiple = plan.batch_multiple()
        axes = "×".join(plan.batch_axes())
        if self.batch % (multiple * self.grad_accum_steps):
            need = f"{axes} = {multiple}"
            if self.grad_accum_steps > 1:
                need += f" times grad_accum_steps = {self.grad_accum_steps}"
            low = self.batch // (multiple * self.grad_accum_steps) * multiple * self.grad_accum_steps
            options = [n for n in (low, low + multiple * self.grad_accum_steps) if n]
            raise ConfigError(
                f"a global batch of {self.batch} cannot be split over {need}; it must be a multiple, such as"
                f" {' or '.join(map(str, options))}"
            )
        if self.task in ("prefill", "decode") and self.length > self.capacity:
            raise ConfigError(f"{self.length} tokens do not fit a cache of {self.capacity} tokens a row")
        cut = plan.activation("kv_cache")[1]
        parts = plan.mesh.size(cut)
        if self.capacity % parts:
            raise ConfigError(
                f"a cache of {self.capacity} tokens a row cannot be split over {'×'.join(cut)} = {parts}, as"
                " the rule for activation 'kv_cache' says; it must be a multiple, such as"
                f" {self.capacity + -self.capacity % parts}"
            )
        self._check_positions(plan)
        vocab = plan.config.vocab_size
        if not 0 <= self.top_n <= vocab:
            raise ConfigError(f"top_n is {self.top_n}; it must lie between 0 and the vocabulary's {vocab}")
        if self.top_n and self.task != "score":
            raise ConfigError(f"top_n has no effect on task {self.task!r}; only `score` lists ids")

    def _check_positions(self, plan: Plan) -> None:
        """Refuse tokens at positions for which a learned table has no row: a look-up would not fail there,
        but give another position's."""
        config = plan.config
        if config.positions != "learned":
            return
        most = round_up(config.max_position, plan.length_multiple())  # what is rounded up holds padding alone
        tokens = self.length
        if self.task in ("prefill", "decode"):
            tokens, most = self.capacity, round_up(most, plan.mesh.size(plan.activation("kv_cache")[1]))
        if tokens > most:
            raise ConfigError(
                f"task {self.task!r}: {tokens} tokens a row are more than this model's learned positions,"
                f" {config.max_position}; use at most so many"
            )

    def _check_model(self, config: ModelConfig) -> None:
        """Refuse a task that this model cannot do, by what it lacks."""
        if self.task in ("prefill", "decode") and not config.causal:
            raise ConfigError(
                f"task {self.task!r}: this model ({config.family}) is an encoder, which reads whole texts and"
                " has no next token; use task logits (Model.logits in Python)"
            )
        if self.task != "hidden" and config.head == "none":
            raise ConfigError(
                f"task {self.task!r}: this is the base model of {config.family} alone, without a head; use"
                " task hidden, or give it a head with `shardwise finetune --objective mlm` (or classify)"
            )
        if self.task in ("prefill", "decode") and config.head != "vocab":
            raise ConfigError(
                f"task {self.task!r}: this model has no head over the vocabulary to choose from"
            )
        if self.top_n and config.head != "vocab":
            raise ConfigError("top_n has no effect on a classifier; its logits are few enough to ask for all")
