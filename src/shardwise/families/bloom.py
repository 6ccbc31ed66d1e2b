"""BLOOM (Le Scao et al. 2022, arXiv:2211.05100): ALiBi, a norm on embeddings, q, k and v in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.families.base import (
    PARTS,
    QUERY,
    Family,
    TensorName,
    linear,
    norm,
    optional,
    refuse_unsupported,
    require,
    split_heads,
)
from shardwise.models.config import ModelConfig

_NEUTRAL = {
    "apply_residual_connection_post_layernorm": (None, False),
    "n_inner": (None,),
    "offset_alibi": (None, 100),  # of the code that it was trained with
}
# What the training code was told; none of it changes the result.
_OF_TRAINING = (
    "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "pretraining_tp",
    "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "unk_token_id",
)  # fmt: skip


def _config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    refuse_unsupported(hf, _NEUTRAL, "bloom")
    for key in _OF_TRAINING:
        hf.get(key)
    width, heads, layers = (
        _first(hf, *names)
        for names in (
            ("n_embed", "hidden_size"), ("n_head", "num_attention_heads"), ("n_layer", "num_hidden_layers")
        )
    )  # fmt: skip
    return ModelConfig(
        vocab_size=require(hf, "vocab_size"),
        embed_dim=require(hf, width),
        num_layers=require(hf, layers),
        num_heads=require(hf, heads),
        num_kv_heads=require(hf, heads),
        head_dim=split_heads(hf, width, heads),
        mlp_dim=4 * require(hf, width),
        max_position=optional(hf, "seq_length", 2048),
        norm="layer",
        norm_eps=optional(hf, "layer_norm_epsilon", 1e-5),
        gated_mlp=False,
        activation="gelu_tanh",
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        positions="alibi",
        embed_norm=True,
        tie_embeddings=optional(hf, "tie_word_embeddings", True),
        initializer_range=optional(hf, "initializer_range", 0.02),
        family="bloom",
    )


def _first(hf: Mapping[str, Any], *keys: str) -> str:
    """The first of the keys that the file has, else the last; they are names of one thing."""
    return next((key for key in keys if hf.get(key) is not None), keys[-1])


def _config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "seq_length": config.max_position,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initializer_range,
    }


def _tensor_names(config: ModelConfig) -> tuple[TensorName, ...]:
    block = "transformer.h.{layer}."
    # Each head's q, k and v lie together: [H, 3, E].
    query, key = ("heads", "q_per_kv", PARTS, "head_dim"), ("kv_heads", PARTS, "head_dim")
    qkv = block + "self_attention.query_key_value"
    names = [
        TensorName("embed/table", "transformer.word_embeddings.weight", (("vocab",), ("embed",))),
        *norm("embed/norm", "transformer.word_embeddings_layernorm", bias=True),
        *norm("layers/attn_norm", block + "input_layernorm", bias=True),
        *linear("layers/attn/q_proj", qkv, query, ("embed",), True, part=(0, 3)),
        *linear("layers/attn/k_proj", qkv, key, ("embed",), True, part=(1, 3)),
        *linear("layers/attn/v_proj", qkv, key, ("embed",), True, part=(2, 3)),
        *linear("layers/attn/o_proj", block + "self_attention.dense", ("embed",), QUERY, True),
        *norm("layers/mlp_norm", block + "post_attention_layernorm", bias=True),
        *linear("layers/mlp/up_proj", block + "mlp.dense_h_to_4h", ("mlp",), ("embed",), True),
        *linear("layers/mlp/down_proj", block + "mlp.dense_4h_to_h", ("embed",), ("mlp",), True),
        *norm("final_norm", "transformer.ln_f", bias=True),
    ]
    if not config.tie_embeddings:
        names.append(TensorName("lm_head/kernel", "lm_head.weight", (("vocab",), ("embed",))))
    return tuple(names)


FAMILY = Family(
    name="bloom",
    model_types=("bloom",),
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    tensor_names=_tensor_names,
    bases=("transformer.", ""),
)
