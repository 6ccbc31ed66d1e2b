"""Phi-3: MHA, GQA and MQA, windows shorter than the sequence, parts of heads that turn, LongRoPE."""

from __future__ import annotations

from typing import Any

from ..family_cases import FamilyCase


def _case(name: str, seed: int, **changes: Any) -> FamilyCase:
    config = {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 61, "hidden_size": 48,
        "intermediate_size": 90, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "original_max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "rope_theta": 10000.0, "rope_scaling": None, "sliding_window": None,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **changes,
    }  # fmt: skip
    return FamilyCase(name, config, seed)


def _longrope(kind: str, pairs: int) -> dict[str, Any]:
    short, long = [1.0 + i / 8 for i in range(pairs)], [1.5 + 3.0 * i for i in range(pairs)]
    return {"type": kind, "short_factor": short, "long_factor": long}


CASES = (
    _case("phi3", 3200),
    _case(
        "phi3_window_mha_part_tied", 3210, num_key_value_heads=None, sliding_window=7, num_hidden_layers=3,
        partial_rotary_factor=0.5, tie_word_embeddings=True, hidden_act="gelu", rope_theta=500.0,
    ),
    _case("phi3_wide_heads_mqa", 3220, num_key_value_heads=1, head_dim=20, hidden_act="gelu_pytorch_tanh"),
    _case(
        "phi3_longrope", 3230, rope_scaling=_longrope("longrope", 6), original_max_position_embeddings=64,
    ),
    _case(
        "phi3_named_yarn_part_window", 3240, num_attention_heads=3, num_key_value_heads=3, sliding_window=50,
        partial_rotary_factor=0.75, rope_scaling=_longrope("yarn", 6), original_max_position_embeddings=64,
    ),
)  # fmt: skip
