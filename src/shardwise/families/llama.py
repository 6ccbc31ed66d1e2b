"""Llama 1 to 3.x and checkpoints of the same form (SmolLM2, TinyLlama, …): config keys and tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.families import kin
from shardwise.families.base import Family, optional, refuse_unsupported
from shardwise.models.config import ModelConfig

NEEDED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "rms_norm_eps",
)  # fmt: skip
"""Keys that a config of Llama's form has."""
# Keys that other readers of this model type honour and that we would compute wrongly if we passed over them.
_NEUTRAL = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (None, 1),
    "sliding_window": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "quantization_config": (None,),
    "num_local_experts": (None,),
    "no_rope_layers": (None,),
}


def _tied(hf: Mapping[str, Any]) -> bool:
    """Whether the head is the embedding table; composite configs say it inside `text_config` only."""
    inner = hf.get("text_config") or {}
    return optional(hf, "tie_word_embeddings", optional(inner, "tie_word_embeddings", False))


def _config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    refuse_unsupported(hf, _NEUTRAL, "llama")
    bias = optional(hf, "attention_bias", False)
    return kin.config_from(
        hf, "llama", qkv_bias=bias, attention_out_bias=bias, mlp_bias=optional(hf, "mlp_bias", False),
        tie_embeddings=_tied(hf),
    )  # fmt: skip


def _config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **kin.config_to(config, "LlamaForCausalLM"),
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


FAMILY = Family(
    name="llama",
    model_types=("llama",),
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    tensor_names=kin.names,
    ignored_tensors=(kin.ROTARY_BUFFERS,),
)
