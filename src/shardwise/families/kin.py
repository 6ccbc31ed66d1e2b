"""What Llama and its kin share: most config keys, and tensor names.

Not here: what sets each of them apart (llama.py, mistral.py, qwen2.py, …).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.errors import ConfigError
from shardwise.families.base import (
    KEY,
    QUERY,
    Dim,
    TensorName,
    activation_from_hf,
    head_dim_from,
    linear,
    norm,
    optional,
    require,
)
from shardwise.families.rope import (
    WHOLE_HEADS,
    RopeKeys,
    max_position_from_hf,
    max_position_to_hf,
    rope_from_hf,
    rope_to_hf,
)
from shardwise.models.config import ModelConfig

ROTARY_BUFFERS = r".*rotary_emb\.inv_freq"
"""Tensors of old checkpoints that hold nothing to learn."""
PRE_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Our names of a layer's norms, and the files'."""


def config_from(
    hf: Mapping[str, Any],
    family: str,
    *,
    rope_keys: RopeKeys | None = WHOLE_HEADS,
    head_dim: int = 0,
    kv_heads: int = 0,
    context: int = 2048,
    eps: float = 1e-6,
    activation_key: str = "hidden_act",
    activation: str = "silu",
    tied: bool = False,
    **more: Any,
) -> ModelConfig:
    """The ModelConfig of a config.json with Llama's keys.

    Args:
        rope_keys: what rotary keys are called; None leaves `rope` to `more`.
        head_dim, kv_heads, context, eps, activation, tied: values where the file has none (0: embed / heads,
            and as many as query heads).
        more: further fields, and those that are otherwise than Llama's.
    """
    heads = require(hf, "num_attention_heads")
    width = head_dim if head_dim and hf.get("head_dim") is None else head_dim_from(hf)
    stated = optional(hf, "max_position_embeddings", context)
    if rope_keys is not None:
        more["rope"] = rope_from_hf(hf, stated, width, rope_keys)
    if kv_heads and "num_key_value_heads" not in hf:
        shared = kv_heads
    else:
        shared = optional(hf, "num_key_value_heads", heads)
    return ModelConfig(
        **{
            "vocab_size": require(hf, "vocab_size"),
            "embed_dim": require(hf, "hidden_size"),
            "num_layers": require(hf, "num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": shared,
            "head_dim": width,
            "mlp_dim": require(hf, "intermediate_size"),
            "max_position": max_position_from_hf(more["rope"], stated),
            "norm_eps": optional(hf, "rms_norm_eps", eps),
            "activation": activation_from_hf(hf, activation_key, activation),
            "tie_embeddings": optional(hf, "tie_word_embeddings", tied),
            "initializer_range": optional(hf, "initializer_range", 0.02),
            "family": family,
            **more,
        }
    )


def config_to(
    config: ModelConfig, architecture: str, rope_keys: RopeKeys | None = WHOLE_HEADS
) -> dict[str, Any]:
    """The keys that `config_from` reads, without the activation, and without rotary ones for None."""
    stated = max_position_to_hf(config.rope, config.max_position)
    return {
        "architectures": [architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": stated,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initializer_range,
        **({} if rope_keys is None else rope_to_hf(config.rope, stated, config.head_dim, rope_keys)),
    }


def attention_names(config: ModelConfig, block: str) -> list[TensorName]:
    """Names of a layer's attention; `block` is what they begin with."""
    attn, qkv = block + "self_attn.", config.qkv_bias
    outputs: Dim = ("embed",)
    names = [
        *linear("layers/attn/q_proj", attn + "q_proj", QUERY, ("embed",), qkv),
        *linear("layers/attn/k_proj", attn + "k_proj", KEY, ("embed",), qkv),
        *linear("layers/attn/v_proj", attn + "v_proj", KEY, ("embed",), qkv),
        *linear("layers/attn/o_proj", attn + "o_proj", outputs, QUERY, config.attention_out_bias),
    ]
    if config.qk_norm:
        names += norm("layers/attn/q_norm", attn + "q_norm", axis="head_dim")
        names += norm("layers/attn/k_norm", attn + "k_norm", axis="head_dim")
    return names


def mlp_names(config: ModelConfig, block: str) -> list[TensorName]:
    """Names of a layer's gated feed-forward layer."""
    mlp, bias = block + "mlp.", config.mlp_bias
    return [
        *linear("layers/mlp/gate_proj", mlp + "gate_proj", ("mlp",), ("embed",), bias),
        *linear("layers/mlp/up_proj", mlp + "up_proj", ("mlp",), ("embed",), bias),
        *linear("layers/mlp/down_proj", mlp + "down_proj", ("embed",), ("mlp",), bias),
    ]


def names(
    config: ModelConfig, norms: Mapping[str, str] = PRE_NORMS, mlp: Sequence[TensorName] | None = None
) -> tuple[TensorName, ...]:
    """Names of all tensors.

    Args:
        norms: our names of a layer's norms → the files'.
        mlp: those of the feed-forward layer, where it is another one.
    """
    block = "model.layers.{layer}."
    found = [
        TensorName("embed/table", "model.embed_tokens.weight", (("vocab",), ("embed",))),
        *norm("final_norm", "model.norm"),
        *attention_names(config, block),
        *(mlp_names(config, block) if mlp is None else mlp),
    ]
    for ours, theirs in norms.items():
        found += norm(f"layers/{ours}", block + theirs)
    if not config.tie_embeddings:
        found.append(TensorName("lm_head/kernel", "lm_head.weight", (("vocab",), ("embed",))))
    return tuple(found)


def window_of(hf: Mapping[str, Any], default: int | None = 4096) -> int:
    """`sliding_window` in tokens; 0 where it is null."""
    window = hf.get("sliding_window", default)
    if window is None:
        return 0
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ConfigError(f"config.json: sliding_window is {window!r}; give a number of tokens, or null")
    return window


def windows_from(hf: Mapping[str, Any], layers: int, window: int, default: Sequence[bool]) -> tuple[int, ...]:
    """ModelConfig.windows from `layer_types`; `default` says for each layer whether it has a window."""
    types = hf.get("layer_types")
    if types is not None:
        known = ("sliding_attention", "full_attention")
        if not isinstance(types, list) or len(types) != layers or any(t not in known for t in types):
            raise ConfigError(
                f"config.json: layer_types is {types!r}; give one of {', '.join(known)} for each of the"
                f" {layers} layers"
            )
        default = [t == "sliding_attention" for t in types]
    if any(default) and not window:
        raise ConfigError("config.json: layer_types asks for a sliding window, but sliding_window is null")
    return tuple(window if local else 0 for local in default) if any(default) else ()


def windows_to(config: ModelConfig) -> dict[str, Any]:
    """`sliding_window` and `layer_types`, which `windows_from` reads."""
    sizes = {window for window in config.windows if window}
    types = ["sliding_attention" if w else "full_attention" for w in config.windows]
    return {
        "sliding_window": min(sizes) if sizes else None,
        "layer_types": types or ["full_attention"] * config.num_layers,
    }
