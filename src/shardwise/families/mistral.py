"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama's layer, with a sliding window in all or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.families import kin
from shardwise.families.base import Family, activation_to_hf, refuse_unsupported, require
from shardwise.models.config import ModelConfig

_NEUTRAL = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "layer_types": (None,),  # another family of transformers (Ministral) mixes windows
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
}


def _config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    refuse_unsupported(hf, _NEUTRAL, "mistral")
    window, layers = kin.window_of(hf), require(hf, "num_hidden_layers")
    return kin.config_from(
        hf, "mistral", kv_heads=8, context=131072, windows=(window,) * layers if window else ()
    )


def _config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **kin.config_to(config, "MistralForCausalLM"),
        "hidden_act": activation_to_hf(config.activation),
        "sliding_window": kin.windows_to(config)["sliding_window"],
    }


FAMILY = Family(
    name="mistral",
    model_types=("mistral",),
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    tensor_names=kin.names,
    ignored_tensors=(kin.ROTARY_BUFFERS,),
)
