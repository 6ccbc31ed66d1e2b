"""Gemma 2 (Riviere et al. 2024, arXiv:2408.00118): norms before and after each half whose scale is added to
one, windows in every other layer, soft caps on scores and logits, embeddings times √D."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.families import kin
from shardwise.families.base import Family, TensorName, optional, refuse_unsupported, require
from shardwise.models.config import ModelConfig

NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
NEUTRAL = {
    "mlp_bias": (None, False),
    "use_bidirectional_attention": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
}


def shared(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that Gemma 2 and 3 read alike."""
    hf.get("hidden_act")  # an older name of hidden_activation, which is the one that counts
    bias = optional(hf, "attention_bias", False)
    return {
        "head_dim": 256,
        "kv_heads": 4,
        "activation_key": "hidden_activation",
        "activation": "gelu_pytorch_tanh",
        "tied": True,
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "norm_plus_one": True,
        "norm_order": "sandwich",
        "query_scalar": float(optional(hf, "query_pre_attn_scalar", 256)),
        "embed_scale": require(hf, "hidden_size") ** 0.5,
    }


def cap(hf: Mapping[str, Any], key: str, default: float | None) -> float | None:
    """A soft cap; null for none."""
    if key in hf and hf[key] is None:
        return None
    return default if key not in hf else float(require(hf, key, float))


def shared_keys(config: ModelConfig) -> dict[str, Any]:
    """The keys that `shared` reads."""
    scalar = config.query_scalar or config.head_dim
    activation = "gelu_pytorch_tanh" if config.activation == "gelu_tanh" else config.activation
    return {
        "hidden_activation": activation,
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        **kin.windows_to(config),
    }


def _config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    refuse_unsupported(hf, NEUTRAL, "gemma2")
    layers = require(hf, "num_hidden_layers")
    return kin.config_from(
        hf, "gemma2", context=8192, **shared(hf),
        windows=kin.windows_from(hf, layers, kin.window_of(hf), [i % 2 == 0 for i in range(layers)]),
        attention_softcap=cap(hf, "attn_logit_softcapping", 50.0),
        logit_softcap=cap(hf, "final_logit_softcapping", 30.0),
    )  # fmt: skip


def _config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {**kin.config_to(config, "Gemma2ForCausalLM"), **shared_keys(config)}


def tensor_names(config: ModelConfig) -> tuple[TensorName, ...]:
    """Those of Gemma 2 and 3."""
    return kin.names(config, NORMS)


FAMILY = Family(
    name="gemma2",
    model_types=("gemma2",),
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    tensor_names=tensor_names,
    ignored_tensors=(kin.ROTARY_BUFFERS,),
)
