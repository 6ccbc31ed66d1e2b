"""config.json of the Llama family: each key that changes numbers is honoured or refused, none passed over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.families import config_from_hf, config_to_hf
from shardwise.models.config import ModelConfig, RopeConfig


def hf(**changes: Any) -> dict[str, Any]:
    """A config.json; a value of `...` removes the key."""
    base = {
        "model_type": "llama",
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 90,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        **changes,
    }
    return {key: value for key, value in base.items() if value is not ...}


def test_sizes_are_read_into_the_field_that_they_mean() -> None:
    assert config_from_hf(hf(head_dim=10)) == ModelConfig(
        vocab_size=101, embed_dim=48, num_layers=3, num_heads=6, num_kv_heads=3, head_dim=10, mlp_dim=90,
        max_position=256, norm_eps=1e-5,
    )  # fmt: skip


def test_keys_that_are_absent_or_null_take_transformers_defaults() -> None:
    nothing = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "rope_theta")
    nothing += ("attention_bias", "mlp_bias", "tie_word_embeddings", "initializer_range", "rope_scaling")
    for value in (..., None):
        found = config_from_hf(hf(**dict.fromkeys(nothing, value)))
        assert (found.num_kv_heads, found.head_dim, found.norm_eps, found.max_position) == (6, 8, 1e-6, 2048)
        assert found.rope == RopeConfig(theta=10000.0)
        assert not (found.qkv_bias or found.attention_out_bias or found.mlp_bias or found.tie_embeddings)
        assert found.initializer_range == 0.02


def test_biases_and_tying_are_read() -> None:
    found = config_from_hf(hf(attention_bias=True, mlp_bias=True, tie_word_embeddings=True))
    assert found.qkv_bias and found.attention_out_bias and found.mlp_bias and found.tie_embeddings


def test_tying_said_inside_text_config_alone_counts_and_the_outer_word_goes_first() -> None:
    assert config_from_hf(hf(text_config={"tie_word_embeddings": True})).tie_embeddings
    assert not config_from_hf(
        hf(tie_word_embeddings=False, text_config={"tie_word_embeddings": True})
    ).tie_embeddings


def test_rotary_settings_are_read_and_written() -> None:
    """What they may say is tested in test_rope.py."""
    scaling = {"rope_type": "linear", "factor": 2.5}
    found = config_from_hf(hf(rope_theta=5e5, rope_scaling=scaling))
    assert found.rope == RopeConfig("linear", 5e5, 2.5)
    out = config_to_hf(found)
    assert (out["rope_theta"], out["rope_scaling"]) == (5e5, scaling)
    assert config_from_hf(out) == found


def test_a_dynamic_rope_stretches_the_context_beyond_max_position_embeddings_and_back() -> None:
    found = config_from_hf(hf(rope_scaling={"rope_type": "dynamic", "factor": 4.0}))
    assert (found.rope.original_max_position, found.max_position) == (256, 1024)
    out = config_to_hf(found)
    assert out["max_position_embeddings"] == 256
    assert config_from_hf(out) == found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' changes the computation"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"vocab_size": ...}, "no 'vocab_size'"),
        ({"hidden_size": 48.0}, "hidden_size is 48.0; expected int"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; expected float"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; expected a finite number"),
        ({"rms_norm_eps": -1e-5}, "norm_eps is -1e-05; it must be a number of at least 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; expected bool"),
        ({"attention_bias": "no"}, "attention_bias is 'no'; expected bool"),
        ({"num_attention_heads": 7}, "hidden_size 48 is no multiple of num_attention_heads 7"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"num_key_value_heads": 4}, "6 query heads cannot share 4 key/value heads"),
        ({"num_key_value_heads": 0}, "num_kv_heads is 0"),
        ({"head_dim": 7}, "head_dim is 7; rotary embedding needs an even one"),
        ({"head_dim": "8"}, "head_dim is '8'"),
        ({"model_type": ...}, 'no "model_type"'),
        (
            {"model_type": "lama", "architectures": ["X"], "rms_norm_eps": ...},
            "'lama' (architectures ['X']) is not supported, and its config is not of Llama's form: it lacks"
            " rms_norm_eps",
        ),
        (
            {"model_type": "lama", "alibi": True},
            "is not of Llama's form: it has alibi = True, which Llama has not; supported:",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_hf(hf(**changes))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"activation": "relu"}, {"qkv_bias": True}, {"attention_out_bias": True}, {"head_bias": True}]
)
def test_a_model_that_a_llama_config_cannot_describe_is_not_written_as_one(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a llama config.json cannot say"):
        config_to_hf(replace(config_from_hf(hf()), **changes))
