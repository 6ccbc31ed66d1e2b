"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Llama's layers with experts, of which a token takes two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.families.base import (
    KEY,
    QUERY,
    Family,
    TensorName,
    activation_from_hf,
    head_dim_from,
    linear,
    norm,
    optional,
    refuse_unsupported,
    require,
)
from shardwise.families.rope import (
    RopeKeys,
    max_position_from_hf,
    max_position_to_hf,
    rope_from_hf,
    rope_to_hf,
)
from shardwise.models.config import ModelConfig

_ROPE = RopeKeys(default_theta=1e6)
_NEUTRAL = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "router_jitter_noise": (None, 0, 0.0),
    "output_router_logits": (None, False),  # True adds a balancing loss in training
    "partial_rotary_factor": (None, 1, 1.0),
}


def _config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    refuse_unsupported(hf, _NEUTRAL, "mixtral")
    layers, window = require(hf, "num_hidden_layers"), optional(hf, "sliding_window", 0)
    stated, heads = optional(hf, "max_position_embeddings", 131072), require(hf, "num_attention_heads")
    rope = rope_from_hf(hf, stated, head_dim_from(hf), _ROPE)
    return ModelConfig(
        vocab_size=require(hf, "vocab_size"),
        embed_dim=require(hf, "hidden_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads
        if hf.get("num_key_value_heads", 8) is None
        else optional(hf, "num_key_value_heads", 8),
        head_dim=head_dim_from(hf),
        mlp_dim=require(hf, "intermediate_size"),
        max_position=max_position_from_hf(rope, stated),
        norm_eps=optional(hf, "rms_norm_eps", 1e-5),
        activation=activation_from_hf(hf, "hidden_act", "silu"),
        rope=rope,
        windows=(window,) * layers if window else (),
        num_experts=optional(hf, "num_local_experts", 8),
        experts_per_token=optional(hf, "num_experts_per_tok", 2),
        tie_embeddings=optional(hf, "tie_word_embeddings", False),
        initializer_range=optional(hf, "initializer_range", 0.02),
        family="mixtral",
    )


def _config_to_hf(config: ModelConfig) -> dict[str, Any]:
    windows, stated = set(config.windows), max_position_to_hf(config.rope, config.max_position)
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": stated,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": config.activation,
        "sliding_window": windows.pop() if len(windows) == 1 else None,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initializer_range,
        **rope_to_hf(config.rope, stated, config.head_dim, _ROPE),
    }


def _tensor_names(config: ModelConfig) -> tuple[TensorName, ...]:
    block = "model.layers.{layer}."
    attn, moe = block + "self_attn.", block + "block_sparse_moe."
    expert = moe + "experts.{expert}."
    names = [
        TensorName("embed/table", "model.embed_tokens.weight", (("vocab",), ("embed",))),
        *norm("final_norm", "model.norm"),
        *norm("layers/attn_norm", block + "input_layernorm"),
        *linear("layers/attn/q_proj", attn + "q_proj", QUERY, ("embed",)),
        *linear("layers/attn/k_proj", attn + "k_proj", KEY, ("embed",)),
        *linear("layers/attn/v_proj", attn + "v_proj", KEY, ("embed",)),
        *linear("layers/attn/o_proj", attn + "o_proj", ("embed",), QUERY),
        *norm("layers/mlp_norm", block + "post_attention_layernorm"),
        *linear("layers/mlp/router", moe + "gate", ("experts",), ("embed",)),
        *linear("layers/mlp/experts/gate_proj", expert + "w1", ("mlp",), ("embed",)),
        *linear("layers/mlp/experts/up_proj", expert + "w3", ("mlp",), ("embed",)),
        *linear("layers/mlp/experts/down_proj", expert + "w2", ("embed",), ("mlp",)),
    ]
    if not config.tie_embeddings:
        names.append(TensorName("lm_head/kernel", "lm_head.weight", (("vocab",), ("embed",))))
    return tuple(names)


FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    tensor_names=_tensor_names,
    ignored_tensors=(r".*rotary_emb\.inv_freq",),
)
