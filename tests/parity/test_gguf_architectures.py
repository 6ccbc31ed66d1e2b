"""GGUF files of every architecture against transformers, live: what we read makes the same model again.

A tiny model of transformers is written as llama.cpp's converters write it, read back by us, and built once
more by transformers from our config and tensors alone. Not here: our own computation (test_live.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from shardwise.checkpoints.reader import open_checkpoint

torch = pytest.importorskip(
    "torch", reason="torch is not installed: the live comparison needs torch and transformers"
)

pytestmark = pytest.mark.parity

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 24, 4
SIZES = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
# model type, GGUF architecture, config.json beside SIZES, metadata that converters make of it.
CASES = {
    "llama": ("llama", "llama", {"attention_bias": True, "tie_word_embeddings": False}, {}),
    "mistral": ("mistral", "llama", {"sliding_window": 5}, {"attention.sliding_window": 5}),
    "qwen2": ("qwen2", "qwen2", {}, {}),
    "qwen3": ("qwen3", "qwen3", {"tie_word_embeddings": True, "rope_theta": 1e6}, {"rope.freq_base": 1e6}),
    "gemma2": (
        "gemma2",
        "gemma2",
        {
            "query_pre_attn_scalar": HEAD_DIM,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.0,
            "sliding_window": 5,
        },
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0, "attention.sliding_window": 5},
    ),
    "gemma3": (
        "gemma3_text",
        "gemma3",
        {
            "query_pre_attn_scalar": HEAD_DIM,
            "sliding_window": 5,
            "layer_types": [LOCAL, GLOBAL, LOCAL, GLOBAL],
            "rope_parameters": {
                GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {
            "attention.sliding_window": 5,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "gemma3 without windows": (
        "gemma3_text",
        "gemma3",
        {"query_pre_attn_scalar": HEAD_DIM, "layer_types": [GLOBAL] * LAYERS},
        {"rope.freq_base": 1e6},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_config_and_tensors_of_the_file_make_the_same_model_again(case: str, tmp_path: Path) -> None:
    model_type, architecture, config, metadata = CASES[case]
    original = build(model_type, SIZES | config)
    file = write_file(tmp_path / "m.gguf", original, architecture, metadata)

    checkpoint = open_checkpoint(file)
    again = build(checkpoint.hf_config["model_type"], checkpoint.hf_config)
    tensors = {
        name: torch.from_numpy(checkpoint.reader.rows(name, 0, info.shape[0]).copy())
        for name, info in checkpoint.reader.tensors().items()
    }
    wanted = weights(original)
    assert set(tensors) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(tensors[name].numpy(), value, err_msg=name)
    missing, unexpected = again.load_state_dict(tensors, strict=False)
    assert unexpected == []
    assert set(missing) <= {"lm_head.weight"}
    again.tie_weights()

    ids = torch.from_numpy(np.random.default_rng(3).integers(0, 40, (2, 20)))
    with torch.no_grad():
        ours, theirs = again(ids).logits.numpy(), original(ids).logits.numpy()
    np.testing.assert_array_equal(ours, theirs)  # the same program on the same numbers


def build(model_type: str, config: dict[str, Any]) -> Any:
    """A model with random weights; norms too, in steps that 1 can be added to exactly."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **config), attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, value in made.named_parameters():
            if name.endswith("norm.weight"):
                value += torch.randint(-128, 128, value.shape) / 256
            elif name.endswith("bias"):
                value += torch.randn(value.shape) / 4
            else:
                value *= 10  # far from uniform attention, so that windows, caps and scales show
    return made


def weights(model: Any) -> dict[str, np.ndarray]:
    """The model's tensors by name; a tied head is not among them."""
    tied = model.config.tie_word_embeddings
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    return {name: value for name, value in state.items() if not (tied and name == "lm_head.weight")}


def write_file(path: Path, model: Any, architecture: str, metadata: dict[str, Any]) -> Path:
    """The model as converters write it, under the names of their own table."""
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, LAYERS)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(SIZES["rms_norm_eps"])
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        adders[type(value)](f"{architecture}.{key}", value)
    for name, value in weights(model).items():
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            value = value + np.float32(1)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = HEADS if "q_proj" in name else KV_HEADS
            value = value.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(value.shape)
        writer.add_tensor(table.get_name(name, (".weight", ".bias")), np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
