"""The form of a family: what each family file fills in.

A tensor's name carries the logical axes of its dims *in the file's order*; the loader turns it into ours by
transposing and splitting, so that a family needs no code for layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError
from shardwise.models.config import ModelConfig, RopeConfig


@dataclass(frozen=True)
class TensorName:
    """One parameter of ours and the tensor of a Hugging Face checkpoint that holds it."""

    path: str
    """Our parameter path; below `layers/` it stands for all layers."""
    hf_name: str
    """Hugging Face name; `{layer}` stands for the layer's number."""
    hf_dims: tuple[tuple[str, ...], ...]
    """For each dim of the file's tensor, the logical axes that it runs over, slowest first:
    (("heads", "q_per_kv", "head_dim"), ("embed",)) is q_proj's (H·E, D)."""


@dataclass(frozen=True)
class Family:
    """One family of models that share config keys and tensor names."""

    name: str
    model_types: tuple[str, ...]
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    config_to_hf: Callable[[ModelConfig], dict[str, Any]]
    tensor_names: Callable[[ModelConfig], tuple[TensorName, ...]]
    ignored_tensors: tuple[str, ...] = ()
    """Regular expressions of tensors that files may carry and that hold nothing to learn (rotary buffers)."""


def require(hf: Mapping[str, Any], key: str, kind: type = int) -> Any:
    """The value of `key`, checked for presence and type."""
    value = hf.get(key)
    if value is None:
        raise ConfigError(f"config.json has no {key!r}, which this model needs")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"config.json: {key} is {value!r}; expected {kind.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"config.json: {key} is {value}; expected a finite number")
    return value


def optional(hf: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of `key` with the default's type checked, or the default where the key is absent or null."""
    return default if hf.get(key) is None else require(hf, key, type(default))


def refuse_unsupported(hf: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], family: str) -> None:
    """Refuse keys that change the mathematics in a way this family does not implement.

    Args:
        neutral: for each such key, the values that change nothing.
    """
    for key, allowed in neutral.items():
        if key in hf and hf[key] not in allowed:
            raise ConfigError(
                f"config.json: {key} = {hf[key]!r} changes the computation and is not supported for {family};"
                f" supported: {', '.join(map(repr, allowed))}"
            )


def rope_from_hf(hf: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Rotary settings: `rope_theta` + `rope_scaling`, or `rope_parameters` as transformers 5 spells them."""
    parameters = hf.get("rope_parameters") or {}
    scaling = {**(hf.get("rope_scaling") or {}), **parameters}
    outer = optional(hf, "rope_theta", 10000.0)
    theta = optional(scaling, "rope_theta", outer)
    if parameters and hf.get("rope_theta") is not None and outer != theta:
        raise ConfigError(
            f"config.json: rope_theta {outer} and rope_parameters.rope_theta {theta} disagree; keep one"
        )
    kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
    known = {"rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor"}
    unknown = set(scaling) - known - {"original_max_position_embeddings"}
    if unknown:
        raise ConfigError(
            f"config.json: rotary keys {sorted(unknown)} are not supported for rope type {kind!r}"
        )
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(
            f"config.json: rope type {kind!r} is not supported; supported: default, linear, llama3"
        )
    if theta <= 0:
        raise ConfigError(f"config.json: rope_theta is {theta}; it must be above 0")
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = require(scaling, "factor", float)
    if factor <= 0:
        raise ConfigError(f"config.json: the rotary factor is {factor}; it must be above 0")
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor)
    low, high = require(scaling, "low_freq_factor", float), require(scaling, "high_freq_factor", float)
    if not 0 < low < high:
        raise ConfigError(
            f"config.json: low_freq_factor {low} must be above 0 and below high_freq_factor {high}"
        )
    original = optional(scaling, "original_max_position_embeddings", max_position)
    return RopeConfig("llama3", theta, factor, low, high, original)


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """Both spellings, agreeing, so that old and new transformers (and vLLM, llama.cpp) read the same."""
    scaling: dict[str, Any] | None = None
    if rope.kind == "linear":
        scaling = {"rope_type": "linear", "factor": rope.factor}
    elif rope.kind == "llama3":
        scaling = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    parameters = {"rope_theta": rope.theta, **(scaling or {"rope_type": "default"})}
    return {"rope_theta": rope.theta, "rope_scaling": scaling, "rope_parameters": parameters}
