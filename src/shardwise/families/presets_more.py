"""Public models of the families beside Llama, as shapes only; see presets.py.

Values are those of each model's published config.json.
"""

from __future__ import annotations

from typing import Any

_Config = dict[str, Any]


def _gpt2(embed: int, layers: int, heads: int) -> _Config:
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257, "n_embd": embed,
        "n_layer": layers, "n_head": heads, "n_positions": 1024, "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    }  # fmt: skip


def _neox(vocab: int, embed: int, layers: int, heads: int) -> _Config:
    return {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": vocab,
        "hidden_size": embed, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 4 * embed, "rotary_pct": 0.25, "max_position_embeddings": 2048,
        "hidden_act": "gelu", "use_parallel_residual": True, "tie_word_embeddings": False,
        "layer_norm_eps": 1e-5,
    }  # fmt: skip


def _bloom(embed: int, layers: int, heads: int) -> _Config:
    return {
        "architectures": ["BloomForCausalLM"], "model_type": "bloom", "vocab_size": 250880,
        "hidden_size": embed, "n_layer": layers, "n_head": heads, "layer_norm_epsilon": 1e-5,
        "seq_length": 2048,
    }  # fmt: skip


def _opt(embed: int, layers: int, heads: int, **more: Any) -> _Config:
    return {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 50272, "hidden_size": embed,
        "num_hidden_layers": layers, "num_attention_heads": heads, "ffn_dim": 4 * embed,
        "max_position_embeddings": 2048, "word_embed_proj_dim": embed, **more,
    }  # fmt: skip


def _roberta(vocab: int, embed: int, layers: int, heads: int, kind: str = "roberta") -> _Config:
    names = {"roberta": "RobertaForMaskedLM", "xlm-roberta": "XLMRobertaForMaskedLM"}
    return {
        "architectures": [names[kind]], "model_type": kind, "vocab_size": vocab, "hidden_size": embed,
        "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * embed,
        "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
        "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip


def _kin(
    architecture: str, kind: str, vocab: int, embed: int, layers: int, heads: int, kv: int, mlp: int,
    context: int, **more: Any,
) -> _Config:  # fmt: skip
    return {
        "architectures": [architecture], "model_type": kind, "vocab_size": vocab, "hidden_size": embed,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "intermediate_size": mlp, "max_position_embeddings": context, **more,
    }  # fmt: skip


def _mistral(vocab: int, **more: Any) -> _Config:
    return _kin(
        "MistralForCausalLM", "mistral", vocab, 4096, 32, 32, 8, 14336, 32768, rms_norm_eps=1e-5, **more
    )


def _mixtral(embed: int, layers: int, heads: int, mlp: int, context: int) -> _Config:
    return _kin(
        "MixtralForCausalLM", "mixtral", 32000, embed, layers, heads, 8, mlp, context, rms_norm_eps=1e-5,
        rope_theta=1e6, num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
    )  # fmt: skip


def _qwen2(embed: int, layers: int, heads: int, kv: int, mlp: int, vocab: int, tied: bool) -> _Config:
    return _kin(
        "Qwen2ForCausalLM", "qwen2", vocab, embed, layers, heads, kv, mlp, 32768, rms_norm_eps=1e-6,
        rope_theta=1e6, use_sliding_window=False, tie_word_embeddings=tied,
    )  # fmt: skip


def _qwen3(embed: int, layers: int, heads: int, mlp: int, tied: bool = False) -> _Config:
    return _kin(
        "Qwen3ForCausalLM", "qwen3", 151936, embed, layers, heads, 8, mlp, 40960, head_dim=128,
        rms_norm_eps=1e-6, rope_theta=1e6, use_sliding_window=False, sliding_window=None,
        tie_word_embeddings=tied,
    )  # fmt: skip


def _gemma2(
    embed: int, layers: int, heads: int, kv: int, mlp: int, width: int = 256, scalar: int = 256
) -> _Config:
    return _kin(
        "Gemma2ForCausalLM", "gemma2", 256000, embed, layers, heads, kv, mlp, 8192, head_dim=width,
        query_pre_attn_scalar=scalar, sliding_window=4096, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6,
    )  # fmt: skip


def _gemma3(
    embed: int, layers: int, heads: int, kv: int, mlp: int, window: int, width: int = 256, scalar: int = 256
) -> _Config:
    small = window == 512  # the two that see text alone
    return _kin(
        "Gemma3ForCausalLM", "gemma3_text", 262144 if small else 262208, embed, layers, heads, kv, mlp,
        32768 if small else 131072, head_dim=width, query_pre_attn_scalar=scalar, sliding_window=window,
        sliding_window_pattern=6, hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6, rope_theta=1e6,
        rope_local_base_freq=1e4, rope_scaling=None if small else {"rope_type": "linear", "factor": 8.0},
    )  # fmt: skip


def _phi3(vocab: int, embed: int, layers: int, heads: int, kv: int, mlp: int, **more: Any) -> _Config:
    return _kin(
        "Phi3ForCausalLM", "phi3", vocab, embed, layers, heads, kv, mlp, more.pop("context", 4096),
        rms_norm_eps=1e-5, **more,
    )  # fmt: skip


MORE: dict[str, _Config] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gpt-j-6b": {
        "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "vocab_size": 50400, "n_embd": 4096,
        "n_layer": 28, "n_head": 16, "n_positions": 2048, "rotary_dim": 64, "tie_word_embeddings": False,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    },
    "pythia-70m": _neox(50304, 512, 6, 8),
    "pythia-160m": _neox(50304, 768, 12, 12),
    "pythia-410m": _neox(50304, 1024, 24, 16),
    "pythia-1b": _neox(50304, 2048, 16, 8),
    "pythia-1.4b": _neox(50304, 2048, 24, 16),
    "pythia-2.8b": _neox(50304, 2560, 32, 32),
    "pythia-6.9b": _neox(50432, 4096, 32, 32),
    "pythia-12b": _neox(50688, 5120, 36, 40),
    "gpt-neox-20b": _neox(50432, 6144, 44, 64),
    "bloom-560m": _bloom(1024, 24, 16),
    "bloom-1b1": _bloom(1536, 24, 16),
    "bloom-1b7": _bloom(2048, 24, 16),
    "bloom-3b": _bloom(2560, 30, 32),
    "bloom-7b1": _bloom(4096, 30, 32),
    "bloom-176b": _bloom(14336, 70, 112),
    "opt-125m": _opt(768, 12, 12),
    "opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
    "roberta-base": _roberta(50265, 768, 12, 12),
    "roberta-large": _roberta(50265, 1024, 24, 16),
    "xlm-roberta-base": _roberta(250002, 768, 12, 12, "xlm-roberta"),
    "xlm-roberta-large": _roberta(250002, 1024, 24, 16, "xlm-roberta"),
    "mistral-7b": _mistral(32000, sliding_window=4096, rope_theta=1e4),
    "mistral-7b-v0.3": _mistral(32768, sliding_window=None, rope_theta=1e6),
    "mixtral-8x7b": _mixtral(4096, 32, 32, 14336, 32768),
    "mixtral-8x22b": _mixtral(6144, 56, 48, 16384, 65536),
    "qwen2-0.5b": _qwen2(896, 24, 14, 2, 4864, 151936, True),
    "qwen2-1.5b": _qwen2(1536, 28, 12, 2, 8960, 151936, True),
    "qwen2-7b": _qwen2(3584, 28, 28, 4, 18944, 152064, False),
    "qwen2-72b": _qwen2(8192, 80, 64, 8, 29568, 152064, False),
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, 151936, True),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, 151936, True),
    "qwen2.5-3b": _qwen2(2048, 36, 16, 2, 11008, 151936, True),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18944, 152064, False),
    "qwen2.5-14b": _qwen2(5120, 48, 40, 8, 13824, 152064, False),
    "qwen2.5-32b": _qwen2(5120, 64, 40, 8, 27648, 152064, False),
    "qwen2.5-72b": _qwen2(8192, 80, 64, 8, 29568, 152064, False),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600),
    "gemma2-2b": _gemma2(2304, 26, 8, 4, 9216),
    "gemma2-9b": _gemma2(3584, 42, 16, 8, 14336),
    "gemma2-27b": _gemma2(4608, 46, 32, 16, 36864, 128, 144),
    "gemma3-270m": _gemma3(640, 18, 4, 1, 2048, 512),
    "gemma3-1b": _gemma3(1152, 26, 4, 1, 6912, 512),
    "gemma3-4b": _gemma3(2560, 34, 8, 4, 10240, 1024),
    "gemma3-12b": _gemma3(3840, 48, 16, 8, 15360, 1024),
    "gemma3-27b": _gemma3(5376, 62, 32, 16, 21504, 1024, 128, 168),
    "phi3-mini": _phi3(32064, 3072, 32, 32, 32, 8192, sliding_window=2047),
    "phi3-medium": _phi3(32064, 5120, 40, 40, 10, 17920, sliding_window=2047),
    "phi4": _phi3(100352, 5120, 40, 40, 10, 17920, context=16384, rope_theta=250000.0, sliding_window=None),
}  # fmt: skip
"""By name."""
