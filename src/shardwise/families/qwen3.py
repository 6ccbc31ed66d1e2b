"""Qwen3 (Yang et al. 2025, arXiv:2505.09388): Llama's layer, norms on queries and keys; Qwen2's windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.families import kin, qwen2
from shardwise.families.base import Family, activation_to_hf, optional, refuse_unsupported
from shardwise.models.config import ModelConfig

_NEUTRAL = {
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
}


def _config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    refuse_unsupported(hf, _NEUTRAL, "qwen3")
    bias = optional(hf, "attention_bias", False)
    return kin.config_from(
        hf, "qwen3", head_dim=128, kv_heads=32, context=32768, qk_norm=True, qkv_bias=bias,
        attention_out_bias=bias, windows=qwen2.windows(hf),
    )  # fmt: skip


def _config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **kin.config_to(config, "Qwen3ForCausalLM"),
        "hidden_act": activation_to_hf(config.activation),
        "attention_bias": config.qkv_bias,
        **qwen2.windows_to(config),
    }


FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    tensor_names=kin.names,
    ignored_tensors=(kin.ROTARY_BUFFERS,),
)
