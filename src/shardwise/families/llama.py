"""Llama 1 to 3.x and checkpoints of the same form (SmolLM2, TinyLlama, …): config keys and tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.families.base import (
    Family,
    TensorName,
    optional,
    refuse_unsupported,
    require,
)
from shardwise.families.rope import max_position_from_hf, max_position_to_hf, rope_from_hf, rope_to_hf
from shardwise.models.config import ModelConfig

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
    heads = require(hf, "num_attention_heads")
    embed_dim = require(hf, "hidden_size")
    head_dim = hf.get("head_dim")
    if head_dim is None:
        if heads < 1 or embed_dim % heads:
            raise ConfigError(
                f"config.json: hidden_size {embed_dim} is no multiple of num_attention_heads {heads}"
            )
        head_dim = embed_dim // heads
    else:
        head_dim = require(hf, "head_dim")
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
    if config.activation != "silu" or config.qkv_bias != config.attention_out_bias:
        raise ConfigError(
            f"a llama config.json cannot say activation {config.activation!r}, qkv_bias {config.qkv_bias} and"
            f" attention_out_bias {config.attention_out_bias}: it has silu, and both biases or neither"
        )
    if config.head_bias:
        raise ConfigError("a llama config.json cannot say head_bias True: its output head has no bias")
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
    block = "model.layers.{layer}."
    query = ("heads", "q_per_kv", "head_dim")
    key = ("kv_heads", "head_dim")
    names = [
        TensorName("embed/table", "model.embed_tokens.weight", (("vocab",), ("embed",))),
        TensorName("final_norm/scale", "model.norm.weight", (("vector",),)),
        TensorName("layers/attn_norm/scale", block + "input_layernorm.weight", (("vector",),)),
        TensorName("layers/attn/q_proj/kernel", block + "self_attn.q_proj.weight", (query, ("embed",))),
        TensorName("layers/attn/k_proj/kernel", block + "self_attn.k_proj.weight", (key, ("embed",))),
        TensorName("layers/attn/v_proj/kernel", block + "self_attn.v_proj.weight", (key, ("embed",))),
        TensorName("layers/attn/o_proj/kernel", block + "self_attn.o_proj.weight", (("embed",), query)),
        TensorName("layers/mlp_norm/scale", block + "post_attention_layernorm.weight", (("vector",),)),
        TensorName("layers/mlp/gate_proj/kernel", block + "mlp.gate_proj.weight", (("mlp",), ("embed",))),
        TensorName("layers/mlp/up_proj/kernel", block + "mlp.up_proj.weight", (("mlp",), ("embed",))),
        TensorName("layers/mlp/down_proj/kernel", block + "mlp.down_proj.weight", (("embed",), ("mlp",))),
    ]
    if not config.tie_embeddings:
        names.append(TensorName("lm_head/kernel", "lm_head.weight", (("vocab",), ("embed",))))
    if config.qkv_bias:
        names += [
            TensorName("layers/attn/q_proj/bias", block + "self_attn.q_proj.bias", (query,)),
            TensorName("layers/attn/k_proj/bias", block + "self_attn.k_proj.bias", (key,)),
            TensorName("layers/attn/v_proj/bias", block + "self_attn.v_proj.bias", (key,)),
        ]
    if config.attention_out_bias:
        names.append(TensorName("layers/attn/o_proj/bias", block + "self_attn.o_proj.bias", (("vector",),)))
    if config.mlp_bias:
        names += [
            TensorName("layers/mlp/gate_proj/bias", block + "mlp.gate_proj.bias", (("mlp",),)),
            TensorName("layers/mlp/up_proj/bias", block + "mlp.up_proj.bias", (("mlp",),)),
            TensorName("layers/mlp/down_proj/bias", block + "mlp.down_proj.bias", (("vector",),)),
        ]
    return tuple(names)


FAMILY = Family(
    name="llama",
    model_types=("llama",),
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    tensor_names=_tensor_names,
    ignored_tensors=(r".*rotary_emb\.inv_freq",),
)
