"""Gemma 3, text (Kamath et al. 2025, arXiv:2503.19786): Gemma 2 with norms on queries and keys instead of
soft caps, five layers with a window to one without, and a rotary embedding for each of the two kinds.

Of a model that sees images too (`model_type: gemma3`) the text part is read, which is said.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.families import kin
from shardwise.families.base import Family, optional, refuse_unsupported, require
from shardwise.families.gemma2 import NEUTRAL, cap, shared, shared_keys, tensor_names
from shardwise.families.rope import RopeKeys, rope_block_from_hf, rope_block_to_hf, rope_from_hf
from shardwise.models.config import ModelConfig, RopeConfig

_THETA, _LOCAL_THETA, _CONTEXT = 1e6, 1e4, 131072
_IMAGE_KEYS = (
    "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index",
    "image_token_id",
)  # fmt: skip


def _config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    if hf.get("text_config") is not None:
        warnings.warn("gemma3: only the text part of this model is read; images are left out", stacklevel=2)
        for key in _IMAGE_KEYS:
            hf.get(key)
        outer = {"tie_word_embeddings": hf.get("tie_word_embeddings", True)}
        hf = {**outer, **hf["text_config"]}
    # transformers has the key of the soft cap on scores, and does not apply it
    refuse_unsupported(hf, {**NEUTRAL, "attn_logit_softcapping": (None,)}, "gemma3_text")
    layers, pattern = require(hf, "num_hidden_layers"), optional(hf, "sliding_window_pattern", 6)
    hf.get("_sliding_window_pattern")
    rope, local_rope = _ropes(hf)
    default = [bool((i + 1) % pattern) for i in range(layers)]
    return kin.config_from(
        hf, "gemma3_text", rope_keys=None, context=_CONTEXT, **shared(hf),
        windows=kin.windows_from(hf, layers, kin.window_of(hf), default),
        rope=rope, local_rope=local_rope, qk_norm=True,
        logit_softcap=cap(hf, "final_logit_softcapping", None),
    )  # fmt: skip


def _ropes(hf: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """That of layers that see all keys, and that of layers with a window."""
    context, width = optional(hf, "max_position_embeddings", _CONTEXT), optional(hf, "head_dim", 256)
    blocks = hf.get("rope_parameters")
    local_theta = optional(hf, "rope_local_base_freq", _LOCAL_THETA)
    if blocks is None:
        rope = rope_from_hf(hf, context, width, RopeKeys(default_theta=_THETA))
        return rope, RopeConfig(theta=local_theta)
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(blocks, Mapping) or not set(blocks) <= set(kinds):
        raise ConfigError(f"config.json: rope_parameters is {blocks!r}; give a block for each of {kinds}")
    for key in ("rope_theta", "rope_scaling"):
        hf.get(key)  # transformers 4's spelling of the same
    found = [
        rope_block_from_hf({"rope_theta": theta, **(blocks.get(kind) or {})}, context, width, kind)
        for kind, theta in zip(kinds, (_THETA, local_theta), strict=True)
    ]
    return found[0], found[1]


def _config_to_hf(config: ModelConfig) -> dict[str, Any]:
    keys = kin.config_to(config, "Gemma3ForCausalLM", rope_keys=None)
    context, local = keys["max_position_embeddings"], config.local_rope or config.rope
    blocks = {
        kind: rope_block_to_hf(rope, context, config.head_dim)
        for kind, rope in (("full_attention", config.rope), ("sliding_attention", local))
    }
    scaling = {key: value for key, value in blocks["full_attention"].items() if key != "rope_theta"}
    return {
        **keys,
        **shared_keys(config),
        "rope_parameters": blocks,
        # as transformers 4 has it
        "rope_theta": config.rope.theta,
        "rope_local_base_freq": local.theta,
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
    }


FAMILY = Family(
    name="gemma3_text",
    model_types=("gemma3_text", "gemma3"),
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    tensor_names=tensor_names,
    ignored_tensors=(kin.ROTARY_BUFFERS, r".*(vision_tower|multi_modal_projector)\..*"),
    bases=("model.", "model.language_model.", "language_model.model.", ""),
)
