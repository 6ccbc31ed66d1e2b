"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024, arXiv:2404.14219): Llama's layer with q, k and v in one
tensor, gate and up in another; LongRoPE; a sliding window in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.families.base import (
    KEY,
    QUERY,
    Family,
    TensorName,
    activation_from_hf,
    activation_to_hf,
    head_dim_from,
    linear,
    norm,
    optional,
    refuse_unsupported,
    require,
)
from shardwise.families.rope import RopeKeys, rope_from_hf, rope_to_hf
from shardwise.models.config import ModelConfig

# Keys of Microsoft's own code that transformers' class has not; the published files have these values.
_NEUTRAL = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "lm_head_bias": (None, False),
    "full_attn_mod": (None, 1),
    "interpolate_factor": (None, 1),
    "quantization_config": (None,),
}
_ROPE = RopeKeys(partial="partial_rotary_factor")
_ORIGINAL = "original_max_position_embeddings"


def _config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    refuse_unsupported(hf, _NEUTRAL, "phi3")
    heads, layers, head_dim = (
        require(hf, "num_attention_heads"), require(hf, "num_hidden_layers"), head_dim_from(hf)
    )  # fmt: skip
    max_position = optional(hf, "max_position_embeddings", 4096)
    rope = rope_from_hf(_rope_keys(hf), max_position, head_dim, _ROPE)
    if rope.kind not in ("default", "longrope"):
        raise ConfigError(f"config.json: rope type {rope.kind!r}; phi3 has only 'default' and 'longrope'")
    window = hf.get("sliding_window")
    if window is not None and require(hf, "sliding_window") < 1:
        raise ConfigError(f"config.json: sliding_window is {window}; it must be at least 1, or null for none")
    return ModelConfig(
        vocab_size=require(hf, "vocab_size"),
        embed_dim=require(hf, "hidden_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=optional(hf, "num_key_value_heads", heads),
        head_dim=head_dim,
        mlp_dim=require(hf, "intermediate_size"),
        max_position=max_position,
        norm_eps=optional(hf, "rms_norm_eps", 1e-5),
        activation=activation_from_hf(hf, "hidden_act", "silu"),
        rope=rope,
        windows=() if window is None else (window,) * layers,
        tie_embeddings=optional(hf, "tie_word_embeddings", False),
        initializer_range=optional(hf, "initializer_range", 0.02),
        family="phi3",
    )


def _rope_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary keys with this family's spellings of LongRoPE put into the usual ones: here `yarn` is
    another name of it, and the context before stretching stands outside of the block, 4096 by default."""
    out: dict[str, Any] = {key: hf.get(key) for key in ("model_type", "rope_theta", "partial_rotary_factor")}
    out[_ORIGINAL] = optional(hf, _ORIGINAL, 4096)
    for where in ("rope_scaling", "rope_parameters"):
        block = hf.get(where)
        if isinstance(block, Mapping):
            block = dict(block) | {
                key: "longrope" for key in ("type", "rope_type") if block.get(key) == "yarn"
            }
        out[where] = block
    return out


def _config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": activation_to_hf(config.activation),
        "sliding_window": config.windows[0] or None if config.windows else None,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initializer_range,
        **rope_to_hf(config.rope, config.max_position, config.head_dim, _ROPE),
    }


def _tensor_names(config: ModelConfig) -> tuple[TensorName, ...]:
    block = "model.layers.{layer}."
    qkv, gate_up = block + "self_attn.qkv_proj", block + "mlp.gate_up_proj"
    names = [
        TensorName("embed/table", "model.embed_tokens.weight", (("vocab",), ("embed",))),
        *norm("layers/attn_norm", block + "input_layernorm"),
        *linear("layers/attn/q_proj", qkv, QUERY, ("embed",), after=(KEY, KEY)),
        *linear("layers/attn/k_proj", qkv, KEY, ("embed",), before=(QUERY,), after=(KEY,)),
        *linear("layers/attn/v_proj", qkv, KEY, ("embed",), before=(QUERY, KEY)),
        *linear("layers/attn/o_proj", block + "self_attn.o_proj", ("embed",), QUERY),
        *norm("layers/mlp_norm", block + "post_attention_layernorm"),
        *linear("layers/mlp/gate_proj", gate_up, ("mlp",), ("embed",), after=(("mlp",),)),
        *linear("layers/mlp/up_proj", gate_up, ("mlp",), ("embed",), before=(("mlp",),)),
        *linear("layers/mlp/down_proj", block + "mlp.down_proj", ("embed",), ("mlp",)),
        *norm("final_norm", "model.norm"),
    ]
    if not config.tie_embeddings:
        names.append(TensorName("lm_head/kernel", "lm_head.weight", (("vocab",), ("embed",))))
    return tuple(names)


FAMILY = Family(
    name="phi3",
    model_types=("phi3",),
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    tensor_names=_tensor_names,
    ignored_tensors=(r".*rotary_emb\.inv_freq",),
)
