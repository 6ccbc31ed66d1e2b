"""Hugging Face model families: config translation both ways and tensor names, one small file each.

Not here: mathematics (models/) and reading of files (checkpoints/).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from shardwise.errors import ConfigError
from shardwise.families import (
    bloom,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    gptj,
    llama,
    mistral,
    mixtral,
    opt,
    phi3,
    qwen2,
    qwen3,
    roberta,
)
from shardwise.families.base import Family, Head, TensorName
from shardwise.families.keys import ConfigKeys
from shardwise.models.config import ModelConfig

__all__ = [
    "Family",
    "Head",
    "TensorName",
    "config_from_hf",
    "config_to_hf",
    "family_of",
    "get_family",
    "with_head",
]

_FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        bloom,
        gemma2,
        gemma3,
        gpt2,
        gpt_neox,
        gptj,
        llama,
        mistral,
        mixtral,
        opt,
        phi3,
        qwen2,
        qwen3,
        roberta,
    )
}
_FAMILIES |= {roberta.XLM.name: roberta.XLM}


def get_family(name: str) -> Family:
    """The family called `name`; ConfigError when there is none."""
    if name not in _FAMILIES:
        raise ConfigError(f"unknown model family {name!r}; known: {', '.join(sorted(_FAMILIES))}")
    return _FAMILIES[name]


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family that a Hugging Face config names by `model_type`; Llama's for one of the same form.

    Raises:
        ConfigError: no `model_type`, or one that no family here reads and that is not of Llama's form; says
            what sets it apart.
    """
    model_type = hf_config.get("model_type")
    by_type = {t: family for family in _FAMILIES.values() for t in family.model_types}
    if not model_type:
        raise ConfigError(
            f'config.json has no "model_type"; add it (known: {", ".join(sorted(by_type))}) if the model is'
            " one of these"
        )
    if model_type in by_type:
        return by_type[model_type]
    apart = _apart_from_llama(hf_config)
    if not apart:
        return llama.FAMILY
    near = get_close_matches(str(model_type), by_type, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"model_type {model_type!r} (architectures {hf_config.get('architectures')}) is not supported, and"
        f" its config is not of Llama's form: {'; '.join(apart)}; supported:"
        f" {', '.join(sorted(by_type))}{hint}"
    )


def _apart_from_llama(hf_config: Mapping[str, Any]) -> list[str]:
    """What keeps a config of an unknown type from being read as Llama's: keys it lacks, keys it has more."""
    lacking = [key for key in llama.NEEDED if hf_config.get(key) is None]
    if lacking:
        return [f"it lacks {', '.join(lacking)}"]
    keys = ConfigKeys(hf_config)
    try:
        llama.FAMILY.config_from_hf(keys)
    except ConfigError as error:
        return [str(error)]
    more = [f"{key} = {value!r}" for key, value in keys.unread().items() if value not in (None, False)]
    return [f"it has {', '.join(more)}, which Llama has not"] if more else []


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Translate a `config.json`'s content into a ModelConfig.

    Warns of keys that nobody read, and of an unknown model type that is read as Llama's.

    Raises:
        ConfigError: names any key that cannot be honoured.
    """
    family, keys = family_of(hf_config), ConfigKeys(hf_config)
    config = family.config_from_hf(keys)
    model_type = hf_config["model_type"]
    if model_type not in family.model_types:
        warnings.warn(
            f"model_type {model_type!r} is not known; its config has Llama's form, so it is read, computed"
            " and exported as Llama. Compare its logits with the original's before you trust it",
            stacklevel=2,
        )
    unread = {key: value for key, value in keys.unread().items() if value is not None}
    if unread:
        found = ", ".join(f"{key} = {value!r}" for key, value in unread.items())
        warnings.warn(f"config.json: not read for {model_type}: {found}", stacklevel=2)
    return config


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Translate a ModelConfig into the keys of a `config.json` that describe the architecture.

    Raises:
        ConfigError: the family's config.json cannot say all of it.
    """
    family = get_family(config.family)
    keys = family.config_to_hf(config)
    config, back = _settled(config), _settled(family.config_from_hf(keys))
    lost = [
        f"{f.name} {getattr(config, f.name)!r} (it would read back as {getattr(back, f.name)!r})"
        for f in fields(config)
        if getattr(config, f.name) != getattr(back, f.name)
    ]
    if lost:
        raise ConfigError(f"a {family.name} config.json cannot say {', '.join(lost)}")
    return keys


def with_head(hf_config: Mapping[str, Any], head: Head, labels: Sequence[str] = ()) -> dict[str, Any]:
    """The config.json of the same model with another head.

    Args:
        labels: names of a classifier's labels.

    Raises:
        ConfigError: the family has no such head.
    """
    family = family_of(hf_config)
    if head not in family.heads:
        able = sorted(f.name for f in _FAMILIES.values() if head in f.heads)
        what = {"vocab": "masked-LM head", "labels": "classifier", "none": "form without a head"}[head]
        raise ConfigError(f"{family.name} models have no {what} here; those that do: {', '.join(able)}")
    keys = {key: value for key, value in hf_config.items() if key not in _OF_LABELS}
    if head == "labels":
        keys["id2label"] = {str(i): name for i, name in enumerate(labels)}
        keys["label2id"] = {name: i for i, name in enumerate(labels)}
    return {**keys, "architectures": [family.heads[head]]}


_OF_LABELS = ("id2label", "label2id", "num_labels", "problem_type", "finetuning_task")


def _settled(config: ModelConfig) -> ModelConfig:
    """The same config with rotary factors stated that would follow from others: a file may state them."""
    if config.rope.kind not in ("yarn", "longrope"):
        return config
    return replace(config, rope=replace(config.rope, attention_factor=config.rope.attention_scaling))
