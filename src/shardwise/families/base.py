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
from shardwise.models.config import ModelConfig


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
