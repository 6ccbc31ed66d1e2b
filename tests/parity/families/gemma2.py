"""Gemma 2: soft caps, norms on both sides with a scale added to one, windows in every other layer."""

from __future__ import annotations

from typing import Any

from ..family_cases import FamilyCase


def _case(name: str, seed: int, **changes: Any) -> FamilyCase:
    config = {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 61, "hidden_size": 64,
        "intermediate_size": 70, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "sliding_window": 15,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "bos_token_id": 2, "eos_token_id": 1,
        "pad_token_id": 0, "tie_word_embeddings": True,
        **changes,
    }  # fmt: skip
    return FamilyCase(name, config, seed)


CASES = (
    _case("gemma2", 4300),
    _case("gemma2_no_caps_biased_layer_types", 4310, attn_logit_softcapping=None,
          final_logit_softcapping=None, attention_bias=True, query_pre_attn_scalar=32,
          layer_types=["full_attention", "sliding_attention", "sliding_attention"], num_key_value_heads=1),
)  # fmt: skip
