"""Rotary settings of a config.json, in both of its spellings, to a RopeConfig and back.

The old spelling is a top-level `rope_theta` and a `rope_scaling` block (null without scaling); transformers 5
has all in one block `rope_parameters`, in some families one for each type of layer. What a RopeConfig means
is in models/positions.py. Not here: anything of one family (its keys' names are handed in as RopeKeys).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast, get_args

from shardwise.errors import ConfigError
from shardwise.families.base import require
from shardwise.models.config import RopeConfig, RopeKind

_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
}
_FIELDS = {"rope_theta": "theta"}
_OLD_NAMES = {"su": "longrope"}


@dataclass(frozen=True)
class RopeKeys:
    """What a family calls rotary settings outside of any block, and what it takes where they are absent."""

    theta: str = "rope_theta"
    """Key of the base (GPT-NeoX: `rotary_emb_base`)."""
    default_theta: float = 10000.0
    """Base where neither this key nor the block has one."""
    partial: str | None = None
    """Key of the part of a head that turns (`partial_rotary_factor`; GPT-NeoX: `rotary_pct`); None for a
    family whose heads turn as a whole."""
    default_partial: float = 1.0
    """That part where neither this key nor the block has it."""


WHOLE_HEADS = RopeKeys()
"""The keys of Llama and its kin."""


def rope_from_hf(
    hf: Mapping[str, Any], max_position: int, head_dim: int, keys: RopeKeys = WHOLE_HEADS
) -> RopeConfig:
    """Rotary settings of a config.json in either spelling; in both, if they agree.

    Args:
        max_position: the config's `max_position_embeddings`, in tokens.

    Raises:
        ConfigError: a rope type or a key that is not supported, a needed key that is missing, a value that
            cannot be computed with, two places that disagree.
    """
    spelled = [where for where in ("rope_parameters", "rope_scaling") if hf.get(where) not in (None, {})]
    rope, *others = (
        rope_block_from_hf(_completed(hf, where, max_position, keys), max_position, head_dim, where)
        for where in spelled or ["rope_parameters"]
    )
    for field in fields(RopeConfig) if others else ():
        one, two = (getattr(found, field.name) for found in (rope, *others))
        if one != two:
            raise ConfigError(
                f"config.json: rope_parameters and rope_scaling disagree on {field.name} ({one} and {two});"
                " keep one of the two blocks"
            )
    if keys.partial is None and rope.rotary_dim is not None:
        raise ConfigError(
            f"config.json: partial_rotary_factor lets {rope.rotary_dim} of a head's {head_dim} features turn;"
            f" in models of type {hf.get('model_type')!r} all do"
        )
    return rope


def rope_block_from_hf(
    block: Mapping[str, Any], max_position: int, head_dim: int, where: str = "rope_parameters"
) -> RopeConfig:
    """Rotary settings of one block: a `rope_parameters`, a `rope_scaling`, or one layer type's of the former.

    Args:
        block: keys that are null count as absent; without `rope_theta` it is 10000.
        max_position: the config's `max_position_embeddings`, in tokens.
        where: what errors call the block.

    Raises:
        ConfigError: as for `rope_from_hf`.
    """
    block = {key: value for key, value in block.items() if value is not None}
    kind = _kind(block, where)
    allowed = (*_COMMON, *_NEEDED[kind], *_OPTIONAL.get(kind, ()))
    unknown = sorted(set(block) - set(allowed))
    if unknown:
        raise ConfigError(
            f"config.json: rotary keys {unknown} in {where} are not supported for rope type {kind!r};"
            f" supported: {', '.join(allowed)}"
        )
    for key in _NEEDED[kind]:
        if key not in block:
            raise ConfigError(f"config.json: {where} has no {key!r}, which rope type {kind!r} needs")
    part = require(block, "partial_rotary_factor", float) if "partial_rotary_factor" in block else 1.0
    if not 0 < part <= 1:
        raise ConfigError(f"config.json: partial_rotary_factor is {part}; it must be above 0 and at most 1")
    width = int(head_dim * part)  # rounded as transformers does
    rope = RopeConfig(
        kind=kind,
        rotary_dim=None if width == head_dim else width,
        **_lengths(block, kind, max_position),
        **{_FIELDS.get(key, key): _value(block, key) for key in _plain_keys(block, kind)},
    )
    rope.features(head_dim)  # refuses what does not fit the head
    return rope


def max_position_from_hf(rope: RopeConfig, stated: int) -> int:
    """Longest context, in tokens, of a model whose `max_position_embeddings` is `stated`.

    For `dynamic` that key is where stretching begins, and with `yarn` many files have it so too; the context
    is what they stretch to, as vLLM has it. Files of other kinds state the stretched context, or do not tell.
    """
    if rope.kind in ("dynamic", "yarn"):
        return max(stated, int(rope.original_max_position * rope.factor))
    return stated


def max_position_to_hf(rope: RopeConfig, max_position: int) -> int:
    """The `max_position_embeddings` of a model with a context of `max_position` tokens.

    Raises:
        ConfigError: it would be read as another context.
    """
    stated = rope.original_max_position if rope.kind == "dynamic" else max_position
    read = max_position_from_hf(rope, stated)
    if read != max_position:
        raise ConfigError(
            f"config.json cannot say a context of {max_position} tokens: rope type {rope.kind!r} with factor"
            f" {rope.factor} and {rope.original_max_position} tokens before stretching makes it {read}"
        )
    return stated


def rope_to_hf(
    rope: RopeConfig, max_position: int, head_dim: int, keys: RopeKeys = WHOLE_HEADS
) -> dict[str, Any]:
    """Both spellings, agreeing, so that old and new transformers (and vLLM, llama.cpp) read the same.

    Args:
        max_position: the config's `max_position_embeddings`, see `max_position_to_hf`.

    Raises:
        ConfigError: the family or the rope type has no key for one of the settings.
    """
    parameters = rope_block_to_hf(rope, max_position, head_dim)
    part = parameters.get("partial_rotary_factor", 1.0)
    if keys.partial is None and part != 1:
        raise ConfigError(
            f"this family's config.json cannot say that {rope.rotary_dim} of {head_dim} features turn"
        )
    scaling = {k: v for k, v in parameters.items() if k not in ("rope_theta", "partial_rotary_factor")}
    out = {
        keys.theta: rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "rope_parameters": parameters,
    }
    if keys.partial is not None:
        out[keys.partial] = part
    if rope.kind == "longrope":
        # transformers 4 looks for it here alone
        out["original_max_position_embeddings"] = rope.original_max_position
    return out


def rope_block_to_hf(rope: RopeConfig, max_position: int, head_dim: int) -> dict[str, Any]:
    """The settings as one block of transformers 5: a `rope_parameters`, or one layer type's of it.

    Args:
        max_position: the config's `max_position_embeddings`, see `max_position_to_hf`.

    Raises:
        ConfigError: the rope type has no key for one of the settings.
    """
    rope.features(head_dim)
    block: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    if rope.rotary_dim is not None and rope.rotary_dim != head_dim:
        block["partial_rotary_factor"] = _part(rope.rotary_dim, head_dim)
    if rope.kind != "default":
        block["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn", "longrope"):
        block["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "dynamic" and rope.original_max_position != max_position:
        raise ConfigError(
            f"config.json cannot say that rope type 'dynamic' stretches beyond {rope.original_max_position}"
            f" tokens: it does beyond max_position_embeddings, {max_position}"
        )
    if rope.kind == "llama3":
        block |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        block |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        block |= {key: getattr(rope, key) for key in ("mscale", "mscale_all_dim") if getattr(rope, key)}
        if not rope.truncate:
            block["truncate"] = False
    if rope.kind == "longrope":
        block |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    # transformers 4 computes longrope's from max_position / original_max_position, whatever the factor
    other = rope.kind == "longrope" and rope.factor != max_position / rope.original_max_position
    if rope.kind in ("yarn", "longrope") and (other or rope.attention_factor is not None):
        block["attention_factor"] = rope.attention_scaling
    return block


def _completed(hf: Mapping[str, Any], where: str, max_position: int, keys: RopeKeys) -> dict[str, Any]:
    """The block called `where` with what stands outside of it, or else the family's defaults, put in."""
    found = hf.get(where) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json: {where} is {found!r}; expected keys and values")
    nested = [key for key, value in found.items() if isinstance(value, Mapping)]
    if nested:
        raise ConfigError(
            f"config.json: {where} has a block for each type of layer ({', '.join(map(str, nested))});"
            f" models of type {hf.get('model_type')!r} have one for all"
        )
    block = {key: value for key, value in found.items() if value is not None}
    original = "original_max_position_embeddings"
    if hf.get(original) is not None and block.get(original) == max_position:
        # transformers fills it in where only the outer one is given, and computes with the outer one
        del block[original]
    places = (
        ("rope_theta", keys.theta, keys.default_theta),
        ("partial_rotary_factor", keys.partial or "partial_rotary_factor", keys.default_partial),
        (original, original, None),
    )
    for key, outside, default in places:
        value = hf.get(outside)
        if value is not None and block.get(key, value) != value:
            raise ConfigError(
                f"config.json: {outside} {value} and {where}.{key} {block[key]} disagree; keep one"
            )
        block.setdefault(key, default if value is None else value)
    return block


def _kind(block: Mapping[str, Any], where: str) -> RopeKind:
    """The block's rope type by its present name."""
    names = [block[key] for key in ("rope_type", "type") if key in block]
    kinds = [_OLD_NAMES.get(name, name) if isinstance(name, str) else name for name in names] or ["default"]
    if kinds[0] != kinds[-1]:
        raise ConfigError(
            f"config.json: {where}.rope_type {names[0]!r} and {where}.type {names[-1]!r} disagree; keep one"
        )
    if kinds[0] not in get_args(RopeKind):
        known = ", ".join(get_args(RopeKind))
        raise ConfigError(f"config.json: rope type {names[0]!r} is not supported; supported: {known}")
    return cast(RopeKind, kinds[0])


def _lengths(block: Mapping[str, Any], kind: str, max_position: int) -> dict[str, Any]:
    """The fields that follow from the context length before and after stretching."""
    key = "original_max_position_embeddings"
    original = require(block, key) if key in block else max_position
    if kind in ("default", "linear"):
        return {}
    if kind == "dynamic" and original != max_position:
        # transformers passes over it; what the author wanted is another model than transformers computes
        raise ConfigError(
            f"config.json: {key} {original} with rope type 'dynamic' differs from max_position_embeddings"
            f" {max_position}, where stretching begins; remove it or make them equal"
        )
    if kind == "longrope" and "factor" not in block and original > 0:
        return {"original_max_position": original, "factor": max_position / original}
    return {"original_max_position": original}


def _plain_keys(block: Mapping[str, Any], kind: str) -> list[str]:
    """Keys of the block that become one field each."""
    return [key for key in ("rope_theta", *_NEEDED[kind], *_OPTIONAL.get(kind, ())) if key in block]


def _value(block: Mapping[str, Any], key: str) -> Any:
    """The checked value of a key as its field has it."""
    if key == "truncate":
        return require(block, key, bool)
    if key not in ("short_factor", "long_factor"):
        return require(block, key, float)
    numbers = require(block, key, list)
    return tuple(require({f"{key}[{i}]": number}, f"{key}[{i}]", float) for i, number in enumerate(numbers))


def _part(rotary_dim: int, head_dim: int) -> float:
    """The part that readers, who cut head_dim · part down to a whole number, turn back into rotary_dim."""
    part = rotary_dim / head_dim
    return part if int(head_dim * part) == rotary_dim else math.nextafter(part, 1.0)
