"""Llama 1 to 3.x and checkpoints of the same form (SmolLM2, TinyLlama, …): config keys and tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.families.base import (
    KEY,
    QUERY,
    Family,
    TensorName,
    head_dim_from,
    linear,
    norm,
    optional,
    refuse_unsupported,
    require,
)
from shardwise.families.rope import max_position_from_hf, max_position_to_hf, rope_from_hf, rope_to_hf
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
    "attention_dropout": (None, 0, 0.0),
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
    heads, embed_dim = require(hf, "num_attention_heads"), require(hf, "hidden_size")
    head_dim = head_dim_from(hf)
    kv_heads = hf.get("num_key_value_heads")
    stated = optional(hf, "max_position_embeddings", 2048)
    rope = rope_from_hf(hf, stated, head_dim)
    bias = optional(hf, "attention_bias", False)
    return ModelConfig(
        vocab_size=require(hf, "vocab_size"),
        embed_dim=embed_dim,
        num_layers=require(hf, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        mlp_dim=require(hf, "intermediate_size"),
        max_position=max_position_from_hf(rope, stated),
        norm_eps=optional(hf, "rms_norm_eps", 1e-6),
        rope=rope,
        tie_embeddings=_tied(hf),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=optional(hf, "mlp_bias", False),
        initializer_range=optional(hf, "initializer_range", 0.02),
        family="llama",
    )


def _config_to_hf(config: ModelConfig) -> dict[str, Any]:
    stated = max_position_to_hf(config.rope, config.max_position)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": stated,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "initializer_range": config.initializer_range,
        **rope_to_hf(config.rope, stated, config.head_dim),
    }


def _tensor_names(config: ModelConfig) -> tuple[TensorName, ...]:
    block, qkv, mlp = "model.layers.{layer}.", config.qkv_bias, config.mlp_bias
    attn = block + "self_attn."
    names = [
        TensorName("embed/table", "model.embed_tokens.weight", (("vocab",), ("embed",))),
        *norm("final_norm", "model.norm"),
        *norm("layers/attn_norm", block + "input_layernorm"),
        *linear("layers/attn/q_proj", attn + "q_proj", QUERY, ("embed",), qkv),
        *linear("layers/attn/k_proj", attn + "k_proj", KEY, ("embed",), qkv),
        *linear("layers/attn/v_proj", attn + "v_proj", KEY, ("embed",), qkv),
        *linear("layers/attn/o_proj", attn + "o_proj", ("embed",), QUERY, config.attention_out_bias),
        *norm("layers/mlp_norm", block + "post_attention_layernorm"),
        *linear("layers/mlp/gate_proj", block + "mlp.gate_proj", ("mlp",), ("embed",), mlp),
        *linear("layers/mlp/up_proj", block + "mlp.up_proj", ("mlp",), ("embed",), mlp),
        *linear("layers/mlp/down_proj", block + "mlp.down_proj", ("embed",), ("mlp",), mlp),
    ]
    if not config.tie_embeddings:
        names.append(TensorName("lm_head/kernel", "lm_head.weight", (("vocab",), ("embed",))))
    return tuple(names)


FAMILY = Family(
    name="llama",
    model_types=("llama",),
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    tensor_names=_tensor_names,
    ignored_tensors=(r".*rotary_emb\.inv_freq",),
)
