"""GPT-2 (Radford et al. 2019): learned positions, layer norms, a feed-forward layer without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.families.base import (
    PARTS,
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
from shardwise.models.config import ModelConfig

_NEUTRAL = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "reorder_and_upcast_attn": (None, False),
    "add_cross_attention": (None, False),
}


def _config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    refuse_unsupported(hf, _NEUTRAL, "gpt2")
    embed_dim, heads = require(hf, "n_embd"), require(hf, "n_head")
    positions = optional(hf, "n_positions", 1024)
    hf.get("n_ctx")  # an older name of n_positions, which is the one that counts
    return ModelConfig(
        vocab_size=require(hf, "vocab_size"),
        embed_dim=embed_dim,
        num_layers=require(hf, "n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim_from(hf, "n_embd", "n_head"),
        mlp_dim=optional(hf, "n_inner", 4 * embed_dim),
        max_position=positions,
        norm="layer",
        norm_eps=optional(hf, "layer_norm_epsilon", 1e-5),
        gated_mlp=False,
        activation=activation_from_hf(hf, "activation_function", "gelu_new"),
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        positions="learned",
        tie_embeddings=optional(hf, "tie_word_embeddings", True),
        initializer_range=optional(hf, "initializer_range", 0.02),
        family="gpt2",
    )


def _config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_embd": config.embed_dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.mlp_dim,
        "n_positions": config.max_position,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": activation_to_hf(config.activation),
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initializer_range,
    }


def _tensor_names(config: ModelConfig) -> tuple[TensorName, ...]:
    block = "transformer.h.{layer}."
    # One tensor [D, 3·H·E] for all three, stored [inputs, outputs] like all of GPT-2's matrices.
    query, key = (PARTS, "heads", "q_per_kv", "head_dim"), (PARTS, "kv_heads", "head_dim")
    qkv = block + "attn.c_attn"
    names = [
        TensorName("embed/table", "transformer.wte.weight", (("vocab",), ("embed",))),
        TensorName("embed/positions", "transformer.wpe.weight", (("positions",), ("embed",))),
        *norm("layers/attn_norm", block + "ln_1", bias=True),
        *linear("layers/attn/q_proj", qkv, query, ("embed",), True, transposed=True, part=(0, 3)),
        *linear("layers/attn/k_proj", qkv, key, ("embed",), True, transposed=True, part=(1, 3)),
        *linear("layers/attn/v_proj", qkv, key, ("embed",), True, transposed=True, part=(2, 3)),
        *linear("layers/attn/o_proj", block + "attn.c_proj", ("embed",), query[1:], True, transposed=True),
        *norm("layers/mlp_norm", block + "ln_2", bias=True),
        *linear("layers/mlp/up_proj", block + "mlp.c_fc", ("mlp",), ("embed",), True, transposed=True),
        *linear("layers/mlp/down_proj", block + "mlp.c_proj", ("embed",), ("mlp",), True, transposed=True),
        *norm("final_norm", "transformer.ln_f", bias=True),
    ]
    if not config.tie_embeddings:
        names.append(TensorName("lm_head/kernel", "lm_head.weight", (("vocab",), ("embed",))))
    return tuple(names)


FAMILY = Family(
    name="gpt2",
    model_types=("gpt2",),
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    tensor_names=_tensor_names,
    ignored_tensors=(r".*\.attn\.(masked_)?bias",),
    bases=("transformer.", ""),
)
