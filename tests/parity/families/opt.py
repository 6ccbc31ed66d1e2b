"""OPT: positions from row 2 on; the 350m's order of norms and narrower embeddings; without biases."""

from __future__ import annotations

from typing import Any

from ..family_cases import FamilyCase


def _case(name: str, seed: int, **changes: Any) -> FamilyCase:
    config = {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 61, "hidden_size": 48,
        "ffn_dim": 90, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256,
        "do_layer_norm_before": True, "word_embed_proj_dim": 48, "activation_function": "relu",
        "enable_bias": True, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 2,
        "pad_token_id": 1,
        **changes,
    }  # fmt: skip
    return FamilyCase(name, config, seed)


CASES = (
    _case("opt", 5100),
    _case("opt_350m_form", 5110, do_layer_norm_before=False, word_embed_proj_dim=36),
    _case("opt_projected_untied_6_heads_gelu", 5120, word_embed_proj_dim=60, num_attention_heads=6,
          tie_word_embeddings=False, activation_function="gelu"),
    _case("opt_no_bias_no_final_norm", 5130, enable_bias=False, _remove_final_layer_norm=True),
)  # fmt: skip
