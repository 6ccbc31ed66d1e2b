"""BLOOM: ALiBi, also for numbers of heads that are no power of two; the keys of public files."""

from __future__ import annotations

from typing import Any

from ..family_cases import FamilyCase


def _case(name: str, seed: int, **changes: Any) -> FamilyCase:
    config = {
        "architectures": ["BloomForCausalLM"], "model_type": "bloom", "vocab_size": 61, "hidden_size": 64,
        "n_layer": 2, "n_head": 4, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 3,
        **changes,
    }  # fmt: skip
    return FamilyCase(name, config, seed)


CASES = (
    _case("bloom", 5000),
    _case("bloom_6_heads_untied", 5010, n_head=6, hidden_size=96, tie_word_embeddings=False, n_layer=3),
)  # fmt: skip
