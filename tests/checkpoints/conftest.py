"""Tiny checkpoints for the tests of this folder; made afresh, no real weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

HEADS, KV_HEADS, HEAD_DIM, EMBED, MLP, VOCAB, LAYERS = 4, 2, 16, 64, 96, 40, 2
_BLOCK = {
    "input_layernorm": ("attn_norm", (EMBED,)),
    "self_attn.q_proj": ("attn_q", (HEADS * HEAD_DIM, EMBED)),
    "self_attn.k_proj": ("attn_k", (KV_HEADS * HEAD_DIM, EMBED)),
    "self_attn.v_proj": ("attn_v", (KV_HEADS * HEAD_DIM, EMBED)),
    "self_attn.o_proj": ("attn_output", (EMBED, HEADS * HEAD_DIM)),
    "post_attention_layernorm": ("ffn_norm", (EMBED,)),
    "mlp.gate_proj": ("ffn_gate", (MLP, EMBED)),
    "mlp.up_proj": ("ffn_up", (MLP, EMBED)),
    "mlp.down_proj": ("ffn_down", (EMBED, MLP)),
}
_TOP = {
    "model.embed_tokens": ("token_embd", (VOCAB, EMBED)),
    "model.norm": ("output_norm", (EMBED,)),
    "lm_head": ("output", (VOCAB, EMBED)),
}


def _interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """q or k rows as llama.cpp's converter orders them, spelled out row by row."""
    head_dim = rows.shape[0] // heads
    stored = np.empty_like(rows)
    for head in range(heads):
        for i in range(head_dim // 2):
            stored[head * head_dim + 2 * i] = rows[head * head_dim + i]
            stored[head * head_dim + 2 * i + 1] = rows[head * head_dim + i + head_dim // 2]
    return stored


@pytest.fixture
def llama_weights() -> dict[str, np.ndarray]:
    """A tiny untied llama with biases on q, k, v and o, under Hugging Face names."""
    rng = np.random.default_rng(0)
    shapes = {f"{name}.weight": shape for name, (_, shape) in _TOP.items()}
    for layer in range(LAYERS):
        for name, (_, shape) in _BLOCK.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            if "self_attn" in name:
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def to_gguf() -> Callable[..., dict[str, np.ndarray]]:
    """Renames Hugging Face weights to GGUF's names; for architecture llama re-orders q and k."""

    def rename(weights: Mapping[str, np.ndarray], architecture: str = "llama") -> dict[str, np.ndarray]:
        renamed = {}
        for name, value in weights.items():
            stem, _, kind = name.rpartition(".")
            if stem in _TOP:
                renamed[f"{_TOP[stem][0]}.{kind}"] = value
                continue
            _, _, layer, part = stem.split(".", 3)
            short = _BLOCK[part][0]
            if architecture == "llama" and short in ("attn_q", "attn_k"):
                value = _interleave(value, HEADS if short == "attn_q" else KV_HEADS)
            renamed[f"blk.{layer}.{short}.{kind}"] = value
        return renamed

    return rename


@pytest.fixture
def write_gguf() -> Callable[..., Path]:
    """Writes a GGUF file: tensors as arrays, or (bytes [rows, row bytes], type) for a quantised one."""

    def write(
        path: Path,
        tensors: Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
        architecture: str = "llama",
    ) -> Path:
        writer = gguf.GGUFWriter(path, architecture)
        values: dict[str, Any] = {
            f"{architecture}.block_count": LAYERS,
            f"{architecture}.context_length": 128,
            f"{architecture}.embedding_length": EMBED,
            f"{architecture}.feed_forward_length": MLP,
            f"{architecture}.attention.head_count": HEADS,
            f"{architecture}.attention.head_count_kv": KV_HEADS,
            f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
            f"{architecture}.rope.freq_base": 10000.0,
            **(settings or {}),
        }
        adders = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        for key, value in values.items():
            if value is not None:
                adders.get(type(value), writer.add_array)(key, value)
        for name, value in tensors.items():
            if isinstance(value, tuple):
                writer.add_tensor(name, value[0], raw_dtype=value[1])
            else:
                writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
