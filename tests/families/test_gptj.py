"""What a GPT-J config.json may say, the names that its files' tensors have, and pairs that lie side by side.

Not here: logits (tests/parity), meshes and predictions (test_on_meshes.py, tests/planner).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.parity.conftest import load_on
from tests.parity.families.gptj import CASES
from tests.parity.family_cases import FamilyCase, golden_logits, inputs, write_checkpoint
from tests.parity.test_goldens import assert_close

import shardwise
from shardwise.errors import ConfigError
from shardwise.families import config_from_hf, config_to_hf
from shardwise.families.presets import preset

CASE, TIED, WHOLE = CASES
CONFIG = dict(CASE.config)


@pytest.mark.filterwarnings("error")
def test_the_config_of_the_6b_is_read_without_a_warning() -> None:
    config = config_from_hf(
        {
            "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0,
            "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256, "gradient_checkpointing": False,
            "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gptj", "n_embd": 4096,
            "n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048, "resid_pdrop": 0.0,
            "rotary": True, "rotary_dim": 64, "scale_attn_weights": True, "summary_activation": None,
            "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
            "summary_use_proj": True, "tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer",
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "transformers_version": "4.18.0.dev0", "use_cache": True, "vocab_size": 50400,
        }
    )  # fmt: skip
    assert config == config_from_hf(preset("gpt-j-6b"))
    assert (config.head_dim, config.mlp_dim, config.rope.rotary_dim) == (256, 16384, 64)


def test_keys_that_a_file_lacks_have_transformers_defaults() -> None:
    needed = ("model_type", "vocab_size", "n_embd", "n_layer", "n_head")
    bare = {**{key: CONFIG[key] for key in needed}, "n_head": 1}  # 64 features turn
    stated = {"n_positions": 2048, "rotary_dim": 64, "n_inner": 256, "initializer_range": 0.02, "n_head": 1}
    assert config_from_hf(bare) == config_from_hf({**CONFIG, **stated})


@pytest.mark.parametrize(
    ("key", "value"), [("rotary", False), ("scale_attn_weights", False), ("add_cross_attention", True)]
)
def test_what_would_change_the_result_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^config.json: {key} = {value} changes the computation.*[^\n]$"):
        config_from_hf({**CONFIG, key: value})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "features turn, but a head has only"),
        (0, "0 features turn; it must be an even number above 0"),
        (5, "5 features turn; it must be an even number above 0"),
        (18, "18 features turn, but a head has only 16"),
    ],
)
def test_a_number_of_turning_features_that_transformers_cannot_compute_is_refused(
    value: int | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from_hf({**CONFIG, "rotary_dim": value})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_config_survives_translation_and_back(case: FamilyCase) -> None:
    config = config_from_hf(case.config)
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize("case", [CASE, TIED], ids=lambda case: case.name)
def test_an_old_file_with_masks_and_bare_names_gives_the_same_logits(
    case: FamilyCase, tmp_path: Path
) -> None:
    """Old files carry each layer's causal mask; a tied head is written out by some tools."""
    write_checkpoint(case, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): array for name, array in load_file(file).items()}
    tensors.setdefault("lm_head.weight", tensors["wte.weight"].copy())
    for layer in range(case.config["n_layer"]):
        tensors[f"h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 8, 8), np.uint8))
        tensors[f"h.{layer}.attn.masked_bias"] = np.array(-1e9, np.float32)
    save_file(tensors, file)
    batch = inputs(case)[0]
    assert_close(load_on(tmp_path).logits(batch.tokens)[batch.keep], golden_logits(case)["plain"], case.name)


@pytest.mark.parametrize("case", [CASE, WHOLE], ids=lambda case: case.name)
def test_pairs_come_apart_and_together_bit_for_bit_where_a_mesh_cuts_the_features(
    case: FamilyCase, tmp_path: Path
) -> None:
    folder = write_checkpoint(case, tmp_path / "in")
    model = shardwise.load(
        folder, mesh="dp:1,fsdp:2,tp:2", compute_dtype="float32", devices=jax.devices()[:4],
        overrides=["q_proj/kernel=None,None,tp,fsdp", "k_proj/kernel=None,tp,fsdp"],
    )  # fmt: skip
    batch = inputs(case)[0]
    assert_close(model.logits(batch.tokens)[batch.keep], golden_logits(case)["plain"], case.name)
    model.export(tmp_path / "out")
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("in", "out"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.tobytes() == after[name].tobytes(), name
