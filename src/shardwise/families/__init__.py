"""Hugging Face model families: config translation both ways and tensor names, one small file each.

Not here: mathematics (models/) and reading of files (checkpoints/).
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from shardwise.errors import ConfigError
from shardwise.families import llama
from shardwise.families.base import Family, TensorName
from shardwise.models.config import ModelConfig

__all__ = ["Family", "TensorName", "config_from_hf", "config_to_hf", "family_of", "get_family"]

_FAMILIES: dict[str, Family] = {llama.FAMILY.name: llama.FAMILY}


def get_family(name: str) -> Family:
    """The family called `name`; ConfigError when there is none."""
    if name not in _FAMILIES:
        raise ConfigError(f"unknown model family {name!r}; known: {', '.join(sorted(_FAMILIES))}")
    return _FAMILIES[name]


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family that a Hugging Face config names by `model_type`.

    Raises:
        ConfigError: no `model_type`, or one that no family here reads.
    """
    model_type = hf_config.get("model_type")
    by_type = {t: family for family in _FAMILIES.values() for t in family.model_types}
    if not model_type:
        raise ConfigError(
            f'config.json has no "model_type"; add it (known: {", ".join(sorted(by_type))}) if the model is'
            " one of these"
        )
    if model_type not in by_type:
        near = get_close_matches(str(model_type), by_type, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"model_type {model_type!r} (architectures {hf_config.get('architectures')}) is not supported;"
            f" supported: {', '.join(sorted(by_type))}{hint}"
        )
    return by_type[model_type]


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Translate a `config.json`'s content into a ModelConfig; ConfigError names any key it cannot honour."""
    return family_of(hf_config).config_from_hf(hf_config)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Translate a ModelConfig into the keys of a `config.json` that describe the architecture."""
    return get_family(config.family).config_to_hf(config)
