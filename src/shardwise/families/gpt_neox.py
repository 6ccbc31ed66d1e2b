"""GPT-NeoX (Black et al. 2022, arXiv:2204.06745) and Pythia: both halves of a layer run side by side, each
with a norm of its own; a part of each head turns; q, k and v of a head lie together in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.families.base import (
    PARTS,
    Family,
    TensorName,
    activation_from_hf,
    activation_to_hf,
    linear,
    norm,
    optional,
    refuse_unsupported,
    require,
    split_heads,
)
from shardwise.families.rope import (
    RopeKeys,
    max_position_from_hf,
    max_position_to_hf,
    rope_from_hf,
    rope_to_hf,
)
from shardwise.models.config import ModelConfig

_NEUTRAL = {"quantization_config": (None,), "num_key_value_heads": (None,)}
_ROPE = RopeKeys(theta="rotary_emb_base", partial="rotary_pct", default_partial=0.25)
# Under these names some versions of transformers wrote the same values a second time.
_COPIES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}


def _config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    refuse_unsupported(hf, _NEUTRAL, "gpt_neox")
    for copy, key in _COPIES.items():
        if hf.get(copy) is not None and hf[copy] != hf.get(key):
            raise ConfigError(
                f"config.json: {copy} is {hf[copy]!r} and {key} {hf.get(key)!r}; this model takes {key}:"
                f" remove {copy} or make them equal"
            )
    heads, head_dim = require(hf, "num_attention_heads"), split_heads(hf)
    stated = optional(hf, "max_position_embeddings", 2048)
    rope = rope_from_hf(hf, stated, head_dim, _ROPE)
    bias = optional(hf, "attention_bias", True)
    return ModelConfig(
        vocab_size=require(hf, "vocab_size"),
        embed_dim=require(hf, "hidden_size"),
        num_layers=require(hf, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        mlp_dim=require(hf, "intermediate_size"),
        max_position=max_position_from_hf(rope, stated),
        norm="layer",
        norm_eps=optional(hf, "layer_norm_eps", 1e-5),
        parallel="two_norms" if optional(hf, "use_parallel_residual", True) else "no",
        gated_mlp=False,
        activation=activation_from_hf(hf, "hidden_act", "gelu"),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=True,
        rope=rope,
        tie_embeddings=optional(hf, "tie_word_embeddings", False),
        initializer_range=optional(hf, "initializer_range", 0.02),
        family="gpt_neox",
    )


def _config_to_hf(config: ModelConfig) -> dict[str, Any]:
    stated = max_position_to_hf(config.rope, config.max_position)
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": stated,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": activation_to_hf(config.activation),
        "use_parallel_residual": config.parallel == "two_norms",
        "attention_bias": config.qkv_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initializer_range,
        **rope_to_hf(config.rope, stated, config.head_dim, _ROPE),
    }


def _tensor_names(config: ModelConfig) -> tuple[TensorName, ...]:
    block, bias = "gpt_neox.layers.{layer}.", config.qkv_bias
    qkv, mlp = block + "attention.query_key_value", block + "mlp."
    query, key = ("heads", "q_per_kv", PARTS, "head_dim"), ("kv_heads", PARTS, "head_dim")
    output = ("heads", "q_per_kv", "head_dim")
    names = [
        TensorName("embed/table", "gpt_neox.embed_in.weight", (("vocab",), ("embed",))),
        *norm("layers/attn_norm", block + "input_layernorm", bias=True),
        *linear("layers/attn/q_proj", qkv, query, ("embed",), bias, part=(0, 3)),
        *linear("layers/attn/k_proj", qkv, key, ("embed",), bias, part=(1, 3)),
        *linear("layers/attn/v_proj", qkv, key, ("embed",), bias, part=(2, 3)),
        *linear(
            "layers/attn/o_proj", block + "attention.dense", ("embed",), output, config.attention_out_bias
        ),
        *norm("layers/mlp_norm", block + "post_attention_layernorm", bias=True),
        *linear("layers/mlp/up_proj", mlp + "dense_h_to_4h", ("mlp",), ("embed",), True),
        *linear("layers/mlp/down_proj", mlp + "dense_4h_to_h", ("embed",), ("mlp",), True),
        *norm("final_norm", "gpt_neox.final_layer_norm", bias=True),
    ]
    if not config.tie_embeddings:
        names.append(TensorName("lm_head/kernel", "embed_out.weight", (("vocab",), ("embed",))))
    return tuple(names)


FAMILY = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    tensor_names=_tensor_names,
    ignored_tensors=(r".*\.attention\.(masked_)?bias", r".*rotary_emb\.inv_freq"),
    bases=("gpt_neox.", ""),
    head_tensor="embed_out.weight",
    also_named=(("embed_out.weight", "lm_head.weight"),),  # transformers 5 calls the module so
)
