"""Qwen2: biases on q, k and v; windows in the upper layers; yarn."""

from __future__ import annotations

from typing import Any

from ..family_cases import FamilyCase


def _case(name: str, seed: int, **changes: Any) -> FamilyCase:
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 61, "hidden_size": 48,
        "intermediate_size": 70, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": 1,
        "eos_token_id": 2, "tie_word_embeddings": True, "use_sliding_window": False,
        "sliding_window": 4096, "max_window_layers": 28,
        **changes,
    }  # fmt: skip
    return FamilyCase(name, config, seed)


CASES = (
    _case("qwen2", 4100),
    _case("qwen2_windows_from_layer_1_untied", 4110, use_sliding_window=True, sliding_window=17,
          max_window_layers=1, num_hidden_layers=3, tie_word_embeddings=False),
    _case("qwen2_layer_types_yarn_mha", 4120, num_key_value_heads=4, use_sliding_window=True,
          sliding_window=9, layer_types=["sliding_attention", "full_attention"],
          rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
)  # fmt: skip
