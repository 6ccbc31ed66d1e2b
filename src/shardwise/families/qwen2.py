"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): Llama's layer with biases on q, k and v; with
`use_sliding_window` the layers from `max_window_layers` on have a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.families import kin
from shardwise.families.base import Family, activation_to_hf, optional, refuse_unsupported, require
from shardwise.models.config import ModelConfig

_NEUTRAL = {
    "attention_bias": (None, True),
    "mlp_bias": (None, False),
    "head_dim": (None,),  # heads split the width; what else the file says is checked below
    "use_mrope": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
}


def windows(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Those of Qwen2 and Qwen3."""
    layers = require(hf, "num_hidden_layers")
    window = kin.window_of(hf) if optional(hf, "use_sliding_window", False) else 0
    hf.get("sliding_window")  # of no effect without use_sliding_window
    first = optional(hf, "max_window_layers", 28)
    if hf.get("layer_types") is None or window:
        return kin.windows_from(hf, layers, window, [bool(window) and i >= first for i in range(layers)])
    refuse_unsupported(hf, {"layer_types": (["full_attention"] * layers,)}, "a model without windows")
    return ()


def _config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    width = require(hf, "hidden_size") // max(1, require(hf, "num_attention_heads"))
    refuse_unsupported(hf, {**_NEUTRAL, "head_dim": (None, width)}, "qwen2")
    return kin.config_from(
        hf, "qwen2", kv_heads=32, context=32768, qkv_bias=True, windows=windows(hf)
    )  # fmt: skip


def windows_to(config: ModelConfig) -> dict[str, Any]:
    """The keys that `windows` reads."""
    first = next((i for i, window in enumerate(config.windows) if window), config.num_layers)
    return {
        **kin.windows_to(config),
        "use_sliding_window": any(config.windows),
        "max_window_layers": first,
    }


def _config_to_hf(config: ModelConfig) -> dict[str, Any]:
    keys = kin.config_to(config, "Qwen2ForCausalLM")
    return {**keys, "hidden_act": activation_to_hf(config.activation), **windows_to(config)}


FAMILY = Family(
    name="qwen2",
    model_types=("qwen2",),
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    tensor_names=kin.names,
    ignored_tensors=(kin.ROTARY_BUFFERS,),
)
