"""GPT-J: parts of heads that turn and whole ones, tied and untied heads with a bias, n_inner and none."""

from __future__ import annotations

from typing import Any

from ..family_cases import FamilyCase


def _case(name: str, seed: int, **changes: Any) -> FamilyCase:
    config = {
        "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "vocab_size": 61, "n_embd": 64,
        "n_head": 4, "n_layer": 2, "n_positions": 256, "n_inner": 90, "rotary_dim": 8,
        "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, **changes,
    }  # fmt: skip
    return FamilyCase(name, config, seed)


CASES = (
    _case("gptj", 6000),
    _case("gptj_tied_6_heads_no_n_inner_relu", 6010, n_embd=96, n_head=6, n_layer=3, n_inner=None,
          tie_word_embeddings=True, activation_function="relu"),
    _case("gptj_whole_heads_turn_gelu", 6020, rotary_dim=16, layer_norm_epsilon=1e-3,
          activation_function="gelu"),
)  # fmt: skip
