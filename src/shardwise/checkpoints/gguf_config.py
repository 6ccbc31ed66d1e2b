"""A GGUF file's metadata as Hugging Face's config.json and generation_config.json.

Not here: which settings an architecture has (`gguf_architectures`), rotary ones (`gguf_rope`), and the file's
tensors (`gguf_reader`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from shardwise.checkpoints.gguf_architectures import ARCHITECTURES, NEUTRAL, Architecture
from shardwise.checkpoints.gguf_metadata import Metadata, shortest
from shardwise.checkpoints.gguf_rope import rope_settings
from shardwise.checkpoints.reader import TensorInfo
from shardwise.errors import CheckpointError


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
    architecture = ARCHITECTURES[meta.prefix]
    if architecture.with_window and meta.get("attention.sliding_window"):
        architecture = architecture.with_window
    for key, value in meta.values.items():
        name = key.removeprefix(f"{meta.prefix}.")
        if name != key and name not in architecture.keys and name not in NEUTRAL:
            raise CheckpointError(
                f"{meta.file}: setting {key!r} ({value}) is not understood, so the model might be"
                " computed wrongly; not supported"
            )
    return architecture


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
    layers = int(meta.require("block_count"))
    _refuse_other_values(meta, architecture, head_dim)
    ids = {"bos": meta.token("bos"), "eos": meta.token("eos"), "pad": meta.token("padding")}
    config: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        **architecture.constants,
        "vocab_size": int(meta.get("vocab_size", len(meta.values.get("tokenizer.ggml.tokens", ())))),
        "hidden_size": embed_dim,
        "intermediate_size": int(meta.require("feed_forward_length")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(meta.require("context_length")),
        "rms_norm_eps": shortest(meta.require("attention.layer_norm_rms_epsilon")),
        **rope_settings(meta, architecture),
        **_windows(meta, architecture, layers),
        **{f"{name}_token_id": number for name, number in ids.items() if number is not None},
    }
    for cap, usual in architecture.softcaps.items():
        config[cap] = shortest(meta.get(cap, usual)) or None
    if architecture.layers_of_27b is not None:
        wide = layers == architecture.layers_of_27b
        config["query_pre_attn_scalar"] = embed_dim // heads if wide else head_dim
    return config


def _refuse_other_values(meta: Metadata, architecture: Architecture, head_dim: int) -> None:
    """Refuse values that this architecture cannot have here."""
    only: dict[str, Any] = {"attention.value_length": head_dim, "rope.dimension_count": head_dim}
    only |= {key: value for key, value in NEUTRAL.items() if key not in architecture.keys}
    windows = architecture.windows
    if windows and windows.rope_base is None:
        only["rope.freq_base_swa"] = meta.get("rope.freq_base", architecture.rope_base)
    for key, wanted in only.items():
        if meta.get(key, wanted) != wanted:
            raise CheckpointError(
                f"{meta.file}: {meta.prefix}.{key} = {meta.get(key)} is not supported for this model; only"
                f" {wanted} is"
            )


def _windows(meta: Metadata, architecture: Architecture, layers: int) -> dict[str, Any]:
    """Size of the sliding window, and in which layers it is if not in all."""
    windows = architecture.windows
    if windows is None:
        return {}
    size = int(meta.get("attention.sliding_window", windows.size))
    if windows.period is None:
        return {"sliding_window": size}
    pattern = meta.raw("attention.sliding_window_pattern", windows.period)
    if not isinstance(pattern, list):  # a period; 0 stands for windows in all layers
        pattern = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(layers)]
    if len(pattern) != layers:
        raise CheckpointError(
            f"{meta.file}: {meta.prefix}.attention.sliding_window_pattern has {len(pattern)} entries, but"
            f" there are {layers} layers"
        )
    kinds = ["sliding_attention" if size and local else "full_attention" for local in pattern]
    # transformers makes the mask of windows even if no layer uses it, and needs some size for that.
    return {"sliding_window": size or int(meta.require("context_length")), "layer_types": kinds}


def complete_from_tensors(
    config: dict[str, Any], tensors: Mapping[str, TensorInfo], architecture: Architecture
) -> None:
    """Add to `config` what only the tensors tell: rows of the table, a head of its own, biases, dtype.

    Rows of the table count, not `vocab_size`: Gemma 3's converter leaves out the rows above its tokens.
    """
    if "model.embed_tokens.weight" in tensors:
        config["vocab_size"] = tensors["model.embed_tokens.weight"].shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    for key, bias in architecture.biases.items():
        config[key] = any(name.endswith(bias) for name in tensors)
    elements: Counter[str] = Counter()
    for info in tensors.values():
        elements[info.dtype.name] += math.prod(info.shape)
    config["torch_dtype"] = elements.most_common(1)[0][0]


def generation_config_from_metadata(meta: Metadata, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Which tokens end a text: end of sequence, of turn, of message; None if the file names none."""
    ends = [meta.token(name) for name in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    if not unique:
        return None
    ids = {key: config[key] for key in ("bos_token_id", "pad_token_id") if key in config}
    return {**ids, "eos_token_id": unique[0] if len(unique) == 1 else unique}
