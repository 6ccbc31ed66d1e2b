"""GPT-J (Wang and Komatsuzaki 2021): one norm for both halves of a layer, run side by side; a part of each
head turns, in pairs of neighbours; an output head with a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.families.base import (
    KEY,
    QUERY,
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
from shardwise.models.config import ModelConfig, RopeConfig

# Of the two keys the published file has more than transformers' class: they are what it always computes.
_NEUTRAL = {
    "rotary": (None, True),
    "scale_attn_weights": (None, True),
    "add_cross_attention": (None, False),
    "quantization_config": (None,),
}


def _config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    refuse_unsupported(hf, _NEUTRAL, "gptj")
    embed_dim, heads = require(hf, "n_embd"), require(hf, "n_head")
    head_dim = split_heads(hf, "n_embd", "n_head")
    # null lets as many features turn as the stream is wide, which a model of one head alone can do
    null = "rotary_dim" in hf and hf["rotary_dim"] is None
    turning = embed_dim if null else optional(hf, "rotary_dim", 64)
    return ModelConfig(
        vocab_size=require(hf, "vocab_size"),
        embed_dim=embed_dim,
        num_layers=require(hf, "n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        mlp_dim=optional(hf, "n_inner", 4 * embed_dim),
        max_position=optional(hf, "n_positions", 2048),
        norm="layer",
        norm_eps=optional(hf, "layer_norm_epsilon", 1e-5),
        parallel="one_norm",
        gated_mlp=False,
        activation=activation_from_hf(hf, "activation_function", "gelu_new"),
        mlp_bias=True,
        rope=RopeConfig(rotary_dim=None if turning == head_dim else turning),
        tie_embeddings=optional(hf, "tie_word_embeddings", False),
        head_bias=True,
        initializer_range=optional(hf, "initializer_range", 0.02),
        family="gptj",
    )


def _config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPTJForCausalLM"],
        "model_type": "gptj",
        "vocab_size": config.vocab_size,
        "n_embd": config.embed_dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.mlp_dim,
        "n_positions": config.max_position,
        "rotary_dim": config.rope.features(config.head_dim),
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": activation_to_hf(config.activation),
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initializer_range,
    }


def _tensor_names(config: ModelConfig) -> tuple[TensorName, ...]:
    block = "transformer.h.{layer}."
    attn, mlp = block + "attn.", block + "mlp."
    turning = config.rope.features(config.head_dim)
    names = [
        TensorName("embed/table", "transformer.wte.weight", (("vocab",), ("embed",))),
        *norm("layers/attn_norm", block + "ln_1", bias=True),
        *linear("layers/attn/q_proj", attn + "q_proj", QUERY, ("embed",), interleaved=turning),
        *linear("layers/attn/k_proj", attn + "k_proj", KEY, ("embed",), interleaved=turning),
        *linear("layers/attn/v_proj", attn + "v_proj", KEY, ("embed",)),
        *linear("layers/attn/o_proj", attn + "out_proj", ("embed",), QUERY),
        *linear("layers/mlp/up_proj", mlp + "fc_in", ("mlp",), ("embed",), True),
        *linear("layers/mlp/down_proj", mlp + "fc_out", ("embed",), ("mlp",), True),
        *norm("final_norm", "transformer.ln_f", bias=True),
        TensorName("lm_head/bias", "lm_head.bias", (("vocab",),)),
    ]
    if not config.tie_embeddings:
        names.append(TensorName("lm_head/kernel", "lm_head.weight", (("vocab",), ("embed",))))
    return tuple(names)


FAMILY = Family(
    name="gptj",
    model_types=("gptj",),
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    tensor_names=_tensor_names,
    ignored_tensors=(r".*\.attn\.(masked_)?bias", r".*\.embed_positions"),
    bases=("transformer.", ""),
)
