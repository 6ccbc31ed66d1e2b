"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Llama's layers with experts, of which a token takes two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.families import kin
from shardwise.families.base import (
    Family,
    TensorName,
    activation_to_hf,
    linear,
    optional,
    refuse_unsupported,
    require,
)
from shardwise.families.rope import RopeKeys
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
    layers, window = require(hf, "num_hidden_layers"), kin.window_of(hf, None)
    return kin.config_from(
        hf, "mixtral", rope_keys=_ROPE, kv_heads=8, context=131072, eps=1e-5,
        windows=(window,) * layers if window else (),
        num_experts=optional(hf, "num_local_experts", 8),
        experts_per_token=optional(hf, "num_experts_per_tok", 2),
    )  # fmt: skip


def _config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **kin.config_to(config, "MixtralForCausalLM", _ROPE),
        "hidden_act": activation_to_hf(config.activation),
        "sliding_window": kin.windows_to(config)["sliding_window"],
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
    }


def _tensor_names(config: ModelConfig) -> tuple[TensorName, ...]:
    moe = "model.layers.{layer}.block_sparse_moe."
    expert = moe + "experts.{expert}."
    experts = [
        *linear("layers/mlp/router", moe + "gate", ("experts",), ("embed",)),
        *linear("layers/mlp/experts/gate_proj", expert + "w1", ("mlp",), ("embed",)),
        *linear("layers/mlp/experts/up_proj", expert + "w3", ("mlp",), ("embed",)),
        *linear("layers/mlp/experts/down_proj", expert + "w2", ("embed",), ("mlp",)),
    ]
    return kin.names(config, mlp=experts)


FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    tensor_names=_tensor_names,
    ignored_tensors=(kin.ROTARY_BUFFERS,),
)
