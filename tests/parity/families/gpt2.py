"""GPT-2: learned positions, fused qkv in Conv1D layout, tied and untied."""

from __future__ import annotations

from typing import Any

from ..family_cases import FamilyCase


def _case(name: str, seed: int, **changes: Any) -> FamilyCase:
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 61, "n_embd": 48,
        "n_head": 4, "n_layer": 2, "n_positions": 256, "n_inner": 90, "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new", "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
        **changes,
    }  # fmt: skip
    return FamilyCase(name, config, seed)


CASES = (
    _case("gpt2", 2000),
    _case("gpt2_untied_6_heads_gelu", 2010, n_head=6, tie_word_embeddings=False, activation_function="gelu"),
    _case("gpt2_no_n_inner_relu", 2020, n_inner=None, n_layer=3, activation_function="relu"),
)
