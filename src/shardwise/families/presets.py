"""Public models by name, as shapes only: enough to plan, explain and pre-train, with no download.

Values are those of each model's published config.json.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from shardwise.errors import ConfigError
from shardwise.families.presets_more import MORE

_LLAMA3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(
    vocab: int, embed: int, layers: int, heads: int, kv: int, mlp: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "vocab_size": vocab, "hidden_size": embed,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "intermediate_size": mlp, "max_position_embeddings": context, "rms_norm_eps": 1e-5, **more,
    }  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    "smollm2-135m": _llama(49152, 576, 30, 9, 3, 1536, 8192, rope_theta=1e5, tie_word_embeddings=True),
    "smollm2-360m": _llama(49152, 960, 32, 15, 5, 2560, 8192, rope_theta=1e5, tie_word_embeddings=True),
    "smollm2-1.7b": _llama(49152, 2048, 24, 32, 32, 8192, 8192, rope_theta=130000, tie_word_embeddings=True),
    "tinyllama-1.1b": _llama(32000, 2048, 22, 32, 4, 5632, 2048, rope_theta=1e4),
    "llama2-7b": _llama(32000, 4096, 32, 32, 32, 11008, 4096, rope_theta=1e4),
    "llama2-13b": _llama(32000, 5120, 40, 40, 40, 13824, 4096, rope_theta=1e4),
    "llama2-70b": _llama(32000, 8192, 80, 64, 8, 28672, 4096, rope_theta=1e4),
    "llama3-8b": _llama(128256, 4096, 32, 32, 8, 14336, 8192, rope_theta=5e5),
    "llama3-70b": _llama(128256, 8192, 80, 64, 8, 28672, 8192, rope_theta=5e5),
    "llama3.1-8b": _llama(128256, 4096, 32, 32, 8, 14336, 131072, rope_theta=5e5, rope_scaling=_LLAMA3_1),
    "llama3.1-70b": _llama(128256, 8192, 80, 64, 8, 28672, 131072, rope_theta=5e5, rope_scaling=_LLAMA3_1),
    "llama3.1-405b": _llama(
        128256, 16384, 126, 128, 8, 53248, 131072, rope_theta=5e5, rope_scaling=_LLAMA3_1,
    ),
    "llama3.2-1b": _llama(
        128256, 2048, 16, 32, 8, 8192, 131072, rope_theta=5e5, rope_scaling=_LLAMA3_1 | {"factor": 32.0},
        tie_word_embeddings=True, head_dim=64,
    ),
    "llama3.2-3b": _llama(
        128256, 3072, 28, 24, 8, 8192, 131072, rope_theta=5e5, rope_scaling=_LLAMA3_1 | {"factor": 32.0},
        tie_word_embeddings=True, head_dim=128,
    ),
    **MORE,
}  # fmt: skip


def preset(name: str) -> dict[str, Any]:
    """The config.json of a public model.

    Raises:
        ConfigError: unknown name; gives the nearest known ones.
    """
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=3, cutoff=0.4)
        known = f"nearest: {', '.join(near)}" if near else f"there are {', '.join(sorted(PRESETS))}"
        raise ConfigError(f"no preset is called {name!r}; {known}")
    return dict(PRESETS[name])
