"""A GGUF file's metadata as Hugging Face's config.json and generation_config.json.

Not here: parsing the file and its tensors (`gguf_reader`). A further architecture is an entry of
`ARCHITECTURES`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.checkpoints.reader import TensorInfo
from shardwise.errors import CheckpointError

ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True)
class Architecture:
    """How a GGUF architecture maps to a Hugging Face model type."""

    model_type: str
    """As in config.json."""
    hf_class: str
    """The class in config.json's `architectures`."""
    permuted_qk: bool
    """Whether converters re-order the q and k rows of each head from (2, E/2) to (E/2, 2)."""


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", permuted_qk=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", permuted_qk=False),
}
# Settings that other architectures have; here they must have these values.
_NEUTRAL = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.sliding_window": 0,
    "attention.causal": True,
    "attention.scale": 0.0,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
}
_KNOWN_KEYS = frozenset(_NEUTRAL) | {
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


@dataclass(frozen=True)
class Metadata:
    """Typed access to a file's key-value pairs."""

    file: Path
    """The file, for messages."""
    values: Mapping[str, Any]
    """All pairs, arrays as lists."""

    @property
    def prefix(self) -> str:
        """The architecture's name, with which the keys of its settings begin."""
        return str(self.values.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The scalar under `<architecture>.<key>`."""
        value = self.values.get(f"{self.prefix}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise CheckpointError(
                    f"{self.file}: {self.prefix}.{key} differs by layer ({value}); not supported"
                )
            return value[0]
        return value

    def require(self, key: str) -> Any:
        """As `get`, of a key that must be there."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.file}: metadata lack {self.prefix}.{key}, which the model needs")
        return value

    def token(self, name: str) -> int | None:
        """The id of a special token."""
        value = self.values.get(f"tokenizer.ggml.{name}_token_id")
        return None if value is None else int(value)


def find_architecture(meta: Metadata) -> Architecture:
    """The file's architecture.

    Raises:
        CheckpointError: it is not supported, or the file is one part of a model or has settings nobody reads.
    """
    parts = meta.values.get("split.count", 0)
    if parts > 1:
        raise CheckpointError(
            f"{meta.file}: is one of {parts} parts of a model; join them first:"
            f" llama-gguf-split --merge {meta.file.name} whole.gguf"
        )
    if meta.prefix not in ARCHITECTURES:
        raise CheckpointError(
            f"{meta.file}: GGUF architecture {meta.prefix!r} is not supported; supported:"
            f" {', '.join(ARCHITECTURES)}"
        )
    for key in meta.values:
        if key.startswith(f"{meta.prefix}.") and key.removeprefix(f"{meta.prefix}.") not in _KNOWN_KEYS:
            raise CheckpointError(
                f"{meta.file}: setting {key!r} ({meta.values[key]}) is not understood, so the model might be"
                " computed wrongly; not supported"
            )
    return ARCHITECTURES[meta.prefix]


def config_from_metadata(meta: Metadata, architecture: Architecture) -> dict[str, Any]:
    """What metadata alone say of config.json.

    Raises:
        CheckpointError: a setting is missing, or has a value that the architecture cannot have here.
    """
    heads, embed_dim = int(meta.require("attention.head_count")), int(meta.require("embedding_length"))
    if heads < 1 or embed_dim < 1:
        raise CheckpointError(
            f"{meta.file}: {heads} heads and embedding length {embed_dim}; both must be above 0"
        )
    head_dim = int(meta.get("attention.key_length", embed_dim // heads))
    neutral = {"attention.value_length": head_dim, "rope.dimension_count": head_dim, **_NEUTRAL}
    for key, wanted in neutral.items():
        if meta.get(key, wanted) != wanted:
            raise CheckpointError(
                f"{meta.file}: {meta.prefix}.{key} = {meta.get(key)} is not supported for this model; only"
                f" {wanted} is"
            )
    ids = {"bos": meta.token("bos"), "eos": meta.token("eos"), "pad": meta.token("padding")}
    return {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "vocab_size": int(meta.get("vocab_size", len(meta.values.get("tokenizer.ggml.tokens", ())))),
        "hidden_size": embed_dim,
        "intermediate_size": int(meta.require("feed_forward_length")),
        "num_hidden_layers": int(meta.require("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(meta.require("context_length")),
        "rms_norm_eps": _shortest(meta.require("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(meta.get("rope.freq_base", 10000.0)),
        "rope_scaling": _declared_scaling(meta),
        **{f"{name}_token_id": number for name, number in ids.items() if number is not None},
    }


def complete_from_tensors(config: dict[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """Add to `config` what only the tensors tell: rows of the table, a head of its own, biases, dtype."""
    if "model.embed_tokens.weight" in tensors:
        config["vocab_size"] = tensors["model.embed_tokens.weight"].shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    if config["model_type"] == "llama":
        config["attention_bias"] = any(name.endswith("self_attn.q_proj.bias") for name in tensors)
        config["mlp_bias"] = any(name.endswith("mlp.up_proj.bias") for name in tensors)
    elements: Counter[str] = Counter()
    for info in tensors.values():
        elements[info.dtype.name] += math.prod(info.shape)
    config["torch_dtype"] = elements.most_common(1)[0][0]


def add_llama3_scaling(config: dict[str, Any], divisors: np.ndarray, file: Path) -> None:
    """Set `config`'s llama3 rope scaling to what `rope_freqs.weight` was made from.

    Converters write what each frequency is divided by and drop the settings, so the usual settings are tried
    until one gives the same divisors. Formula: `_compute_llama3_parameters` of transformers.

    Args:
        config: from `config_from_metadata`.
        divisors: the tensor, float32 [E/2].
        file: for messages.

    Raises:
        CheckpointError: no known setting gives these divisors, or another scaling is declared.
    """
    if config["rope_scaling"] is not None:
        raise CheckpointError(f"{file}: has {ROPE_FREQS} besides another rope scaling; not supported")
    if divisors.dtype == np.float32 and divisors.shape == (config["head_dim"] // 2,):
        if np.all(divisors == 1.0):
            return
        # Wavelengths grow along the head up to about rope_theta, so the last one is scaled in full.
        factor = _shortest(divisors[-1])
        lengths = [8192, *(2**power for power in range(10, 21)), config["max_position_embeddings"]]
        for high_freq_factor in (4.0, 2.0, 8.0, 16.0, 32.0):
            for length in lengths:
                scaling = {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": high_freq_factor,
                    "original_max_position_embeddings": length,
                }
                wanted = llama3_divisors(config["head_dim"], config["rope_theta"], scaling)
                # Converters compute in float32: some units in the last place (1e-7), which one subtraction of
                # near-equal numbers lets grow. Other candidates differ by whole factors.
                if np.allclose(wanted, divisors, rtol=1e-4, atol=0):
                    config["rope_scaling"] = scaling
                    return
    raise CheckpointError(
        f"{file}: {ROPE_FREQS} of shape {divisors.shape} matches no known llama3 rope scaling; not supported"
    )


def llama3_divisors(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> np.ndarray:
    """What llama3 scaling divides each frequency by, float64 [E/2]."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] / wavelengths  # within the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def generation_config_from_metadata(meta: Metadata, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Which tokens end a text: end of sequence, of turn, of message; None if the file names none."""
    ends = [meta.token(name) for name in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    if not unique:
        return None
    ids = {key: config[key] for key in ("bos_token_id", "pad_token_id") if key in config}
    return {**ids, "eos_token_id": unique[0] if len(unique) == 1 else unique}


def _shortest(value: float) -> float:
    """The shortest number that rounds to the same float32: the file holds 1e-5 as 9.99999975e-6."""
    return float(str(np.float32(value)))


def _declared_scaling(meta: Metadata) -> dict[str, Any] | None:
    """Rotary scaling that metadata state; without a type llama.cpp takes linear."""
    kind = meta.get("rope.scaling.type", "linear")
    factor = _shortest(meta.get("rope.scaling.factor", meta.get("rope.scale_linear", 0.0)))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind != "linear":
        raise CheckpointError(f"{meta.file}: rope scaling {kind!r} is not supported; supported: none, linear")
    return {"rope_type": "linear", "factor": factor}
