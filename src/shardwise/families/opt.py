"""OPT (Zhang et al. 2022, arXiv:2205.01068): learned positions, of which two come before the first; the 350m
has its norms behind each half, none at the end, and narrower embeddings between two projections."""

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
from shardwise.models.config import ModelConfig

_NEUTRAL = {"layer_norm_elementwise_affine": (None, True)}


def _config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    refuse_unsupported(hf, _NEUTRAL, "opt")
    width, heads, bias = (
        require(hf, "hidden_size"), require(hf, "num_attention_heads"), optional(hf, "enable_bias", True)
    )  # fmt: skip
    before, words = optional(hf, "do_layer_norm_before", True), optional(hf, "word_embed_proj_dim", width)
    removed = optional(hf, "_remove_final_layer_norm", False)
    return ModelConfig(
        vocab_size=require(hf, "vocab_size"),
        embed_dim=width,
        num_layers=require(hf, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=split_heads(hf),
        mlp_dim=require(hf, "ffn_dim"),
        max_position=optional(hf, "max_position_embeddings", 2048),
        norm="layer",
        norm_order="pre" if before else "post",
        final_norm=before and not removed,
        gated_mlp=False,
        activation=activation_from_hf(hf, "activation_function", "relu"),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        positions="learned",
        position_offset=2,
        word_dim=words if words != width else 0,
        tie_embeddings=optional(hf, "tie_word_embeddings", True),
        initializer_range=optional(hf, "init_std", 0.02),
        family="opt",
    )


def _config_to_hf(config: ModelConfig) -> dict[str, Any]:
    before = config.norm_order == "pre"
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "word_embed_proj_dim": config.word_dim or config.embed_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "ffn_dim": config.mlp_dim,
        "max_position_embeddings": config.max_position,
        "do_layer_norm_before": before,
        "_remove_final_layer_norm": before and not config.final_norm,
        "activation_function": activation_to_hf(config.activation),
        "enable_bias": config.qkv_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "init_std": config.initializer_range,
    }


def _tensor_names(config: ModelConfig) -> tuple[TensorName, ...]:
    base, bias, words = "model.decoder.", config.qkv_bias, (config.word_axis,)
    block = base + "layers.{layer}."
    attn = block + "self_attn."
    names = [
        TensorName("embed/table", base + "embed_tokens.weight", (("vocab",), words)),
        TensorName("embed/positions", base + "embed_positions.weight", (("positions",), ("embed",))),
        *norm("layers/attn_norm", block + "self_attn_layer_norm", bias=True),
        *linear("layers/attn/q_proj", attn + "q_proj", QUERY, ("embed",), bias),
        *linear("layers/attn/k_proj", attn + "k_proj", KEY, ("embed",), bias),
        *linear("layers/attn/v_proj", attn + "v_proj", KEY, ("embed",), bias),
        *linear("layers/attn/o_proj", attn + "out_proj", ("embed",), QUERY, bias),
        *norm("layers/mlp_norm", block + "final_layer_norm", bias=True),
        *linear("layers/mlp/up_proj", block + "fc1", ("mlp",), ("embed",), bias),
        *linear("layers/mlp/down_proj", block + "fc2", ("embed",), ("mlp",), bias),
    ]
    if config.final_norm:
        names += norm("final_norm", base + "final_layer_norm", bias=True)
    if words != ("embed",):
        names += linear("project_in", base + "project_in", ("vector",), words)
        names += linear("project_out", base + "project_out", ("word_vector",), ("embed",))
    if not config.tie_embeddings:
        names.append(TensorName("lm_head/kernel", "lm_head.weight", (("vocab",), words)))
    return tuple(names)


FAMILY = Family(
    name="opt",
    model_types=("opt",),
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    tensor_names=_tensor_names,
    bases=("model.decoder.", "decoder.", ""),
)
