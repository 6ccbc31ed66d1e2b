"""Mistral: a window shorter than the sequence, none, heads that do not split the width."""

from __future__ import annotations

from typing import Any

from ..family_cases import FamilyCase


def _case(name: str, seed: int, **changes: Any) -> FamilyCase:
    config = {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 61, "hidden_size": 48,
        "intermediate_size": 70, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": 1,
        "eos_token_id": 2, "sliding_window": 13, "tie_word_embeddings": False,
        **changes,
    }  # fmt: skip
    return FamilyCase(name, config, seed)


CASES = (
    _case("mistral", 4000),
    _case("mistral_no_window_head_dim_20_tied", 4010, sliding_window=None, head_dim=20, num_attention_heads=3,
          num_key_value_heads=1, tie_word_embeddings=True, hidden_act="gelu"),
)  # fmt: skip
