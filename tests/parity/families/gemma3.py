"""Gemma 3: a rotary embedding for layers with a window and one for those without, q and k norms."""

from __future__ import annotations

from typing import Any

from ..family_cases import FamilyCase


def _case(name: str, seed: int, **changes: Any) -> FamilyCase:
    config = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 70, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24,
        "sliding_window": 15, "sliding_window_pattern": 3, "bos_token_id": 2, "eos_token_id": 1,
        "pad_token_id": 0, "tie_word_embeddings": True,
        **changes,
    }  # fmt: skip
    return FamilyCase(name, config, seed)


CASES = (
    _case("gemma3", 4400),
    _case("gemma3_linear_8_softcap_mqa", 4410, rope_scaling={"rope_type": "linear", "factor": 8.0},
          final_logit_softcapping=4.0, num_key_value_heads=1,
          num_hidden_layers=2, sliding_window_pattern=2),
    _case("gemma3_nested_rope_parameters", 4420, num_hidden_layers=2,
          layer_types=["full_attention", "sliding_attention"], rope_theta=None, rope_local_base_freq=None,
          rope_parameters={"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
                           "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}),
)  # fmt: skip
