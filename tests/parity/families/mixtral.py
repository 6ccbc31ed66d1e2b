"""Mixtral: dropless experts, all of them or some, windows shorter than the sequence, MQA."""

from __future__ import annotations

from typing import Any

from ..family_cases import FamilyCase


def _case(name: str, seed: int, **changes: Any) -> FamilyCase:
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 61,
        "hidden_size": 48, "intermediate_size": 70, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_theta": 1e6, "sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, **changes,
    }  # fmt: skip
    return FamilyCase(name, config, seed)


CASES = (
    _case("mixtral", 3000),
    _case("mixtral_window_tied", 3010, sliding_window=13, tie_word_embeddings=True, num_local_experts=6),
    _case("mixtral_mqa_3_of_3", 3020, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=3,
          head_dim=20, num_hidden_layers=3),
)  # fmt: skip
