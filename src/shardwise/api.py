"""The public entry points: open a model on a mesh, plan it, ask it for logits.

Everything here is also what the commands call. Not here: training (training/) and generation
(serving/generate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardwise.checkpoints.export import export
from shardwise.checkpoints.load import load_params
from shardwise.checkpoints.reader import Checkpoint, open_checkpoint
from shardwise.checkpoints.tokenizer import check_tokenizer_fits, has_tokenizer, load_tokenizer
from shardwise.errors import CheckpointError, ConfigError, ContextError, MeshError
from shardwise.families import config_from_hf
from shardwise.families.presets import PRESETS, preset
from shardwise.models.cache import KVCache, cache_shape, outgrown
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import Params, plan_model, unstack
from shardwise.partition.constraints import Placement
from shardwise.partition.mesh import MeshSpec, build_mesh, default_mesh
from shardwise.partition.padding import round_up
from shardwise.partition.plan import Plan
from shardwise.partition.presets import load_rules
from shardwise.partition.rows import put_rows
from shardwise.partition.rules import HeadLayout, Override, Rules
from shardwise.steps.build import Step, build_step
from shardwise.steps.workload import Task, Workload

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_model(model: str | Path) -> Checkpoint:
    """Open a MODEL argument: a folder, a `.gguf` file, a `config.json`, or a preset's name (shapes only).

    Raises:
        CheckpointError: it is none of these.
    """
    if str(model) in PRESETS and not Path(model).exists():
        return Checkpoint(Path(str(model)), "config", preset(str(model)), None, None)
    try:
        return open_checkpoint(model)
    except CheckpointError as error:
        if Path(model).exists() or "/" in str(model) or "." in str(model):
            raise
        try:
            preset(str(model))
        except ConfigError as unknown:
            raise CheckpointError(f"{error}; and {unknown}") from None
        raise


def resolve_mesh(mesh: str | MeshSpec | None, task: str, devices: Sequence[Any] | None = None) -> MeshSpec:
    """A mesh with all sizes known, for the devices that there are; None takes default_mesh(task)."""
    found = tuple(jax.devices() if devices is None else devices)
    kind = found[0].platform
    try:
        spec = MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh or default_mesh(task)
    except MeshError as error:
        raise MeshError(
            f"{error}; there are {len(found)} {kind} device{'s' if len(found) > 1 else ''}"
        ) from None
    return spec.resolve(len(found), kind)


def plan(
    model: str | Path | ModelConfig,
    mesh: str | MeshSpec,
    *,
    rules: Rules | str | None = None,
    overrides: Iterable[str] = (),
    head_layout: HeadLayout | None = None,
) -> Plan:
    """How a model would be cut on a mesh; needs neither weights nor devices.

    Args:
        model: MODEL argument or a ModelConfig.
        mesh: every size given (no -1), since no devices are looked at.
        rules: the name of a preset, a YAML file of rules, or Rules; default the preset `fsdp+tp`.
        overrides: `REGEX=SPEC` strings, tried in order before the rules.
        head_layout: of the output head; None leaves it to rules and overrides.

    Raises:
        ConfigError: rules or overrides that this model and mesh cannot follow.
    """
    config = model if isinstance(model, ModelConfig) else config_from_hf(open_model(model).hf_config)
    spec = MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh
    if -1 in spec.sizes.values():
        raise ConfigError(f"mesh {spec} has a -1, but planning looks at no devices; give all three sizes")
    rules = load_rules(rules) if isinstance(rules, str) else rules
    if isinstance(overrides, str):
        raise ConfigError(f"overrides is the text {overrides!r}; give a list of such texts: [{overrides!r}]")
    return plan_model(config, spec, rules, [Override.parse(text) for text in overrides], head_layout)


_plan = plan  # load() has an argument of that name


@dataclass(frozen=True)
class Model:
    """A model on a mesh."""

    checkpoint: Checkpoint
    """What it was loaded from."""
    plan: Plan
    mesh: jax.sharding.Mesh
    params: Params
    """One array per layer, or stacked."""
    compute_dtype: str = "float32"

    @property
    def config(self) -> ModelConfig:
        """True sizes and options."""
        return self.plan.config

    @property
    def devices(self) -> tuple[Any, ...]:
        """Devices of the mesh."""
        return tuple(self.mesh.devices.flat)

    @property
    def param_dtype(self) -> str:
        """Dtype of the parameters."""
        return str(next(iter(self.params.values())).dtype)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's own tokenizer, checked against the embedding; CheckpointError if none."""
        tokenizer = load_tokenizer(self.checkpoint)
        check_tokenizer_fits(tokenizer, self.config.vocab_size)
        return tokenizer

    @cached_property
    def decode_params(self) -> Params:
        """The parameters as one array per layer, as the cached steps take them."""
        return unstack(self.plan, self.mesh, self.params)

    def step(self, task: Task, batch: int, length: int, **options: Any) -> Step:
        """build_step for this model; see Workload for options."""
        workload = Workload(
            task, batch, length, compute_dtype=self.compute_dtype, param_dtype=self.param_dtype, **options
        )
        return build_step(self.plan, workload, self.devices)

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache of zeros."""
        shapes = cache_shape(
            Placement(self.plan, self.mesh, np.dtype(jax.numpy.dtype(self.compute_dtype))), batch, capacity
        )
        return _zeros(shapes)

    def emptied(self, cache: KVCache) -> KVCache:
        """The same arrays as a cache that holds nothing: what rows held is overwritten before it is seen."""
        zeros = {"lengths": np.zeros(cache.lengths.shape, np.int32)}
        return replace(cache, **put_rows(self.plan, self.mesh, zeros))

    def logits(self, tokens: np.ndarray, attention_mask: np.ndarray | None = None) -> np.ndarray:
        """Logits at every place of whole sequences.

        Args:
            tokens: int [B, T]; any B (rows are added to suit the mesh, and dropped again).
            attention_mask: int [B, T], 1 for tokens and 0 for padding, left or right; default all 1.

        Returns:
            float32 (float64 for float64 compute) [B, T, V]; at padding they mean nothing. Of a classifier
            [B, labels], from the first real token of each row.

        Raises:
            ContextError: T is above the model's context.
            ConfigError: an id outside the vocabulary, or a model without a head.
        """
        return self._of_sequences("logits", tokens, attention_mask)

    def hidden_states(self, tokens: np.ndarray, attention_mask: np.ndarray | None = None) -> np.ndarray:
        """Last hidden states at every place of whole sequences, after the final norm: [B, T, D] in the
        compute dtype, or of the words' own width where that is another (OPT-350m). Arguments and errors as
        for `logits`."""
        return self._of_sequences("hidden", tokens, attention_mask)

    def _of_sequences(self, task: Task, tokens: np.ndarray, attention_mask: np.ndarray | None) -> np.ndarray:
        tokens = self._checked(tokens)
        mask = np.ones_like(tokens) if attention_mask is None else np.asarray(attention_mask).astype(np.int32)
        if task == "logits" and self.config.head == "labels":  # which reads the first place
            order = np.argsort(1 - mask, axis=1, kind="stable")
            tokens, mask = (np.take_along_axis(array, order, axis=1) for array in (tokens, mask))
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0).astype(np.int32)
        batch = {
            "tokens": tokens * mask,
            "targets": np.zeros_like(tokens),
            "segment_ids": mask,
            "positions": positions,
            "weights": np.zeros(tokens.shape, np.float32),
        }
        rows, length = tokens.shape
        multiple = self.plan.length_multiple()
        padded = {name: self._fill(array, multiple) for name, array in batch.items()}
        step = self.step(task, *padded["tokens"].shape)
        out = step(self.params, put_rows(self.plan, self.mesh, padded))
        return np.asarray(out.addressable_data(0))[:rows, :length]

    def cached_logits(self, tokens: np.ndarray, prefill: int) -> np.ndarray:
        """Logits of given tokens through the cache: `prefill` at once, the rest one at a time.

        At a length that outgrows the cache (models.cache.outgrown) all tokens so far go in at once, anew.

        Args:
            tokens: int [B, T].
            prefill: how many of the T go in first, at least 1.

        Returns:
            float32 [B, T, V]; nothing is known of places before the last prefilled one: they are NaN.
        """
        tokens = self._checked(tokens)
        rows, length = tokens.shape
        filled = self._fill(tokens)
        batch = filled.shape[0]
        multiple = self.plan.length_multiple()
        capacity = round_up(length, multiple)  # rules may cut activations over the length
        cache = self.empty_cache(batch, capacity)
        kind = np.float64 if self.compute_dtype == "float64" else np.float32
        out = np.full((rows, length, self.config.vocab_size), np.nan, kind)
        for start, stop in [(0, prefill), *((at, at + 1) for at in range(prefill, length))]:
            if outgrown(self.config, np.array([start]), np.array([stop])):
                start, cache = 0, self.emptied(cache)
            task: Task = "prefill" if start == 0 else "decode"
            width = round_up(stop, multiple) if start == 0 else 1
            step = self.step(task, batch, width, capacity=capacity, choose="logits")
            new = np.pad(filled[:, start:stop], [(0, 0), (0, width - (stop - start))])
            counts = np.full((batch,), stop - start, np.int32)
            given = put_rows(self.plan, self.mesh, {"tokens": new, "counts": counts})
            logits, cache = step(self.decode_params, cache, given["tokens"], given["counts"], None)
            out[:, stop - 1] = np.asarray(logits.addressable_data(0))[:rows]
        return out

    def export(self, out: str | Path, dtype: str | None = None) -> None:
        """Write a Hugging Face folder with config, weights, tokenizer and generation config; see export()."""
        source = self.checkpoint
        tokenizer = self.tokenizer if has_tokenizer(source) else None  # weights alone stay weights alone
        export(
            out, self.plan, self.mesh, self.params,
            dtype=dtype, hf_config=source.hf_config, generation_config=source.generation_config,
            tokenizer=tokenizer,
        )  # fmt: skip

    def with_params(self, params: Params) -> Model:
        """The same model with other parameters."""
        return replace(self, params=params)

    def _checked(self, tokens: np.ndarray) -> np.ndarray:
        tokens = np.asarray(tokens).astype(np.int32)
        if tokens.ndim != 2:
            raise ConfigError(f"tokens have shape {tokens.shape}; expected [batch, length]")
        if tokens.shape[1] > self.config.max_position:
            raise ContextError(
                f"{tokens.shape[1]} tokens are more than the model's context of {self.config.max_position}"
            )
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self.config.vocab_size):
            bad = int(tokens.max()) if tokens.max() >= self.config.vocab_size else int(tokens.min())
            raise ConfigError(f"token id {bad} is outside the vocabulary of {self.config.vocab_size}")
        return tokens

    def _fill(self, array: np.ndarray, length_multiple: int = 1) -> np.ndarray:
        """[B, T] with zeros added so that the mesh divides the batch, and the length if need be."""
        rows, length = array.shape
        return np.pad(array, [(0, -rows % self.plan.batch_multiple()), (0, -length % length_multiple)])


def _zeros(shapes: Any) -> Any:
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, _zeros_program(tuple(leaves))())


@lru_cache(maxsize=32)
def _zeros_program(leaves: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[[], list[jax.Array]]:
    """Compiled once for each set of shapes: every request begins with an empty cache."""
    return jax.jit(
        lambda: [jax.numpy.zeros(x.shape, x.dtype) for x in leaves],
        out_shardings=[x.sharding for x in leaves],
    )


def load(
    model: str | Path,
    *,
    mesh: str | MeshSpec | None = None,
    compute_dtype: str = "float32",
    param_dtype: str | None = None,
    devices: Sequence[Any] | None = None,
    rules: Rules | str | None = None,
    overrides: Iterable[str] = (),
    head_layout: HeadLayout | None = None,
    plan: Plan | None = None,
    stacked: bool = False,
    task: str = "generate",
) -> Model:
    """Load a model's weights onto a mesh.

    Args:
        model: a Hugging Face folder or a `.gguf` file.
        mesh: like `1,1,-1` or `fsdp:2,tp:2`; default all devices on `tp` (on `fsdp` for task `train`).
        compute_dtype: of activations and of weights at use.
        param_dtype: of the parameters as held; None keeps the checkpoint's.
        devices: those of the mesh; default all.
        rules, overrides, head_layout: see plan().
        plan: how to cut it, instead of mesh, rules, overrides and head_layout.
        stacked: hold all layers in one array (training) instead of one array per layer (generation).

    Raises:
        CheckpointError, ConfigError, MeshError: with what is wrong and how to mend it.
    """
    checkpoint = open_model(model)
    config = config_from_hf(checkpoint.hf_config)
    if plan is None:
        plan = _plan(
            config, resolve_mesh(mesh, task, devices), rules=rules, overrides=overrides,
            head_layout=head_layout,
        )  # fmt: skip
    elif mesh is not None or rules is not None or overrides or head_layout is not None:
        raise ConfigError(
            "load: give either plan or mesh, rules, overrides and head_layout; a plan has all four"
        )
    elif plan.config != config:
        raise ConfigError(f"load: the plan is for another model than {model}; plan this one")
    device_mesh = build_mesh(plan.mesh, devices)
    params = load_params(checkpoint, plan, device_mesh, param_dtype, stacked)
    return Model(checkpoint, plan, device_mesh, params, compute_dtype)
