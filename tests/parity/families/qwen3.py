"""Qwen3: norms on queries and keys, heads that do not split the width, biases, windows."""

from __future__ import annotations

from typing import Any

from ..family_cases import FamilyCase


def _case(name: str, seed: int, **changes: Any) -> FamilyCase:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 61, "hidden_size": 48,
        "intermediate_size": 70, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": 1,
        "eos_token_id": 2, "head_dim": 16, "attention_bias": False, "tie_word_embeddings": False,
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": 28,
        **changes,
    }  # fmt: skip
    return FamilyCase(name, config, seed)


CASES = (
    _case("qwen3", 4200),
    _case("qwen3_biased_windows_mqa_tied", 4210, attention_bias=True, use_sliding_window=True,
          sliding_window=11, max_window_layers=1, num_key_value_heads=1, tie_word_embeddings=True),
)  # fmt: skip
