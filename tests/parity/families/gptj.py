"""GPT-J: heads that turn in part and as a whole, tied and untied, with and without `n_inner`."""

from __future__ import annotations

from typing import Any

from ..family_cases import FamilyCase


def _case(name: str, seed: int, **changes: Any) -> FamilyCase:
    config = {
        "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "vocab_size": 61, "n_embd": 48,
        "n_head": 4, "n_layer": 2, "n_positions": 256, "n_inner": None, "rotary_dim": 4,
        "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, **changes,
    }  # fmt: skip
    return FamilyCase(name, config, seed)


CASES = (
    _case("gptj", 3000),
    _case(
        "gptj_whole_heads_tied_relu", 3010, n_head=6, rotary_dim=8, n_inner=90, n_layer=3,
        tie_word_embeddings=True, activation_function="relu",
    ),
)  # fmt: skip
