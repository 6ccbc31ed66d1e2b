"""GPT-NeoX: halves side by side and one after the other, parts of heads that turn, every stretching."""

from __future__ import annotations

from typing import Any

from ..family_cases import FamilyCase


def _case(name: str, seed: int, **changes: Any) -> FamilyCase:
    config = {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": 61,
        "hidden_size": 64, "intermediate_size": 90, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 256, "layer_norm_eps": 1e-5, "hidden_act": "gelu", "rotary_pct": 0.25,
        "rotary_emb_base": 10000, "use_parallel_residual": True, "attention_bias": True,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, **changes,
    }  # fmt: skip
    return FamilyCase(name, {key: value for key, value in config.items() if value is not ...}, seed)


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

CASES = (
    _case("gpt_neox", 3100),
    _case("gpt_neox_serial_gelu_fast", 3110, use_parallel_residual=False, hidden_act="gelu_fast"),
    _case(
        "gpt_neox_tied_no_attention_bias_linear", 3120, hidden_size=48, num_attention_heads=6,
        num_hidden_layers=3, hidden_act="relu", attention_bias=False, tie_word_embeddings=True,
        rotary_pct=1.0, rotary_emb_base=500, rope_scaling={"type": "linear", "factor": 2.0},
    ),
    _case(
        "gpt_neox_yarn_quick_gelu", 3130, hidden_act="quick_gelu", use_parallel_residual=False,
        rotary_pct=..., rotary_emb_base=...,
        rope_parameters={**_YARN, "rope_theta": 3000.0, "partial_rotary_factor": 0.5},
    ),
    # One layer: only there does a cache know what `dynamic` computes of the whole sequence.
    _case(
        "gpt_neox_dynamic_1_layer_silu", 3140, hidden_act="silu", num_hidden_layers=1, rotary_pct=0.5,
        max_position_embeddings=64, rope_scaling={"rope_type": "dynamic", "factor": 4.0},
    ),
)  # fmt: skip
