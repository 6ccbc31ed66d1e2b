"""GGUF architectures and what Hugging Face calls them: model types, tensor names, settings.

A further architecture is an entry of `ARCHITECTURES`. What an entry states are facts of llama.cpp: its
converters (conversion/*.py) write the files and its src/models/*.cpp compute with them.
Not here: code that applies an entry to settings (`gguf_config`, `gguf_rope`) or tensors (`gguf_reader`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Tensors outside the layers; the same in all architectures here."""
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        "attention.causal": True,
        "attention.scale": 0.0,
        "attention.sliding_window": 0,
        "attn_logit_softcapping": 0.0,
        "embedding_scale": 1.0,
        "expert_count": 0,
        "expert_used_count": 0,
        "final_logit_softcapping": 0.0,
        "logit_scale": 1.0,
        "pooling_type": 0,
        "residual_scale": 1.0,
        "rope.scaling.attn_factor": 1.0,
    }
)
"""Settings that some architecture has; in the others they must have these values, which change nothing."""
_COMMON_KEYS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.factor",
        "rope.scaling.finetuned",  # says how the model was trained, not how it is computed
        "rope.scaling.original_context_length",  # of no effect without scaling and with linear scaling
        "rope.scaling.type",
        "tensor_data_layout",  # q and k rows are in the same order under both layouts in use
        "vocab_size",
    }
)


@dataclass(frozen=True)
class Windows:
    """Layers in which a query sees only the last tokens."""

    period: int | None
    """The last of so many layers sees all tokens, where the file has no pattern; None: every layer has a
    window, and no file has a pattern."""
    size: int = 0
    """Tokens seen, the query's own among them, where the file does not say; 0: all of them."""
    rope_base: float | None = None
    """Base of these layers' rotary frequencies where the file does not say; None: always that of all
    layers. One of their own goes without the scaling that metadata state."""

    @property
    def keys(self) -> frozenset[str]:
        """The settings about windows."""
        pattern = () if self.period is None else ("attention.sliding_window_pattern", "rope.freq_base_swa")
        return frozenset({"attention.sliding_window", *pattern})


@dataclass(frozen=True)
class Architecture:
    """How a GGUF architecture maps to a Hugging Face model type."""

    model_type: str
    """As in config.json."""
    hf_class: str
    """The class in config.json's `architectures`."""
    constants: Mapping[str, Any]
    """Keys of config.json whose values all files share."""
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LAYER_NAMES)
    """A layer's tensors, without `blk.N.` and `.weight`, and what follows `model.layers.N.` there."""
    biases: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json that say whether a kind of bias exists, and the name such a bias ends in."""
    permuted_qk: bool = False
    """Whether converters re-order the q and k rows of each head from (2, E/2) to (E/2, 2)."""
    rope_freqs: bool = False
    """Whether a tensor may hold divisors of the rotary frequencies."""
    norms_plus_one: bool = False
    """Whether converters add 1 to the norms' weights, which Hugging Face's model adds when it runs."""
    rope_base: float | None = 10000.0
    """Base of rotary frequencies where the file does not say; None: it has to."""
    softcaps: Mapping[str, float] = field(default_factory=dict)
    """Soft caps, by their name there and here, with the value where the file does not say; 0: none."""
    windows: Windows | None = None
    """Sliding windows, of an architecture that has any."""
    layers_of_27b: int | None = None
    """Gemma: the number of layers by which llama.cpp knows the 27B model, which scales attention scores by
    1/√(D/H) where smaller ones have 1/√E. No key says it, but Hugging Face's query_pre_attn_scalar does."""
    with_window: Architecture | None = None
    """What a file is instead if it states a window."""

    @property
    def keys(self) -> frozenset[str]:
        """Settings that are honoured or of no effect, without the architecture's name."""
        return _COMMON_KEYS | frozenset(self.softcaps) | (self.windows.keys if self.windows else frozenset())


_SILU = {"hidden_act": "silu"}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_ATTENTION_BIAS = {"attention_bias": "self_attn.q_proj.bias"}
_LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    _SILU,
    biases={**_ATTENTION_BIAS, "mlp_bias": "mlp.up_proj.bias"},
    permuted_qk=True,
    rope_freqs=True,
)
# The converter writes Mistral as llama and, in most versions, without the window: such a file says nothing
# of one, and is computed as llama.cpp computes it.
_MISTRAL = replace(
    _LLAMA, model_type="mistral", hf_class="MistralForCausalLM", biases={}, windows=Windows(period=None)
)
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": replace(_LLAMA, with_window=_MISTRAL),
        "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _SILU),
        "qwen3": Architecture(
            "qwen3",
            "Qwen3ForCausalLM",
            _SILU,
            layer_names=_LAYER_NAMES | _QK_NORMS,
            biases=_ATTENTION_BIAS,
        ),
        "gemma2": Architecture(
            "gemma2",
            "Gemma2ForCausalLM",
            _GELU,
            layer_names=_LAYER_NAMES | _GEMMA_NORMS,
            biases=_ATTENTION_BIAS,
            norms_plus_one=True,
            softcaps={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            windows=Windows(period=2, size=4096),
            layers_of_27b=46,
        ),
        "gemma3": Architecture(
            "gemma3_text",
            "Gemma3ForCausalLM",
            _GELU,
            layer_names=_LAYER_NAMES | _QK_NORMS | _GEMMA_NORMS,
            biases=_ATTENTION_BIAS,
            norms_plus_one=True,
            rope_base=None,
            softcaps={"final_logit_softcapping": 0.0},
            windows=Windows(period=6, rope_base=10000.0),
            layers_of_27b=62,
        ),
    }
)
"""By the name in `general.architecture`."""
