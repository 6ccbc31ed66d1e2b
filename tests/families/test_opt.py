"""What an OPT config.json may say, the names that its files' tensors have, and positions beyond its table.

Not here: logits (tests/parity), meshes and predictions (test_on_meshes.py, tests/planner).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from tests.parity.conftest import load_on
from tests.parity.families.opt import CASES
from tests.parity.family_cases import FamilyCase, golden_logits, inputs, write_checkpoint
from tests.parity.test_goldens import assert_close

from shardwise.errors import ConfigError
from shardwise.families import config_from_hf, config_to_hf

CASE = CASES[0]
FORM_350M = next(case for case in CASES if case.name == "opt_350m_form")
CONFIG = dict(CASE.config)


@pytest.mark.filterwarnings("error")
def test_the_config_of_the_350m_is_read_without_a_warning() -> None:
    config = config_from_hf(
        {
            "_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu",
            "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2,
            "do_layer_norm_before": False, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 4096,
            "hidden_size": 1024, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048,
            "model_type": "opt", "num_attention_heads": 16, "num_hidden_layers": 24, "pad_token_id": 1,
            "prefix": "</s>", "torch_dtype": "float16", "transformers_version": "4.20.0.dev0",
            "use_cache": True, "vocab_size": 50272, "word_embed_proj_dim": 512,
        }
    )  # fmt: skip
    assert (config.word_dim, config.norm_order, config.final_norm) == (512, "post", False)


def test_keys_that_older_files_lack_have_transformers_defaults() -> None:
    needed = (
        "vocab_size",
        "hidden_size",
        "ffn_dim",
        "num_hidden_layers",
        "num_attention_heads",
        "model_type",
    )
    config = config_from_hf({key: CONFIG[key] for key in needed})
    assert config_from_hf({**CONFIG, "max_position_embeddings": 2048}) == config


def test_norms_without_parameters_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^config.json: layer_norm_elementwise_affine = False changes"):
        config_from_hf({**CONFIG, "layer_norm_elementwise_affine": False})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_config_survives_translation_and_back(case: FamilyCase) -> None:
    config = config_from_hf(case.config)
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize("base", ["decoder.", ""])
def test_other_beginnings_of_the_names_give_the_same_logits(base: str, tmp_path: Path) -> None:
    write_checkpoint(FORM_350M, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {base + name.removeprefix("model.decoder."): array for name, array in load_file(file).items()}
    tensors["lm_head.weight"] = tensors[base + "embed_tokens.weight"].copy()  # as some tools write it
    save_file(tensors, file)
    batch, golden = inputs(FORM_350M)[0], golden_logits(FORM_350M)
    assert_close(load_on(tmp_path).logits(batch.tokens)[batch.keep], golden["plain"], "plain")


def test_exporting_the_350ms_form_keeps_its_order_of_norms_and_its_projections(tmp_path: Path) -> None:
    load_on(write_checkpoint(FORM_350M, tmp_path / "in")).export(tmp_path / "out")
    keys: dict[str, Any] = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {"do_layer_norm_before": False, "_remove_final_layer_norm": False, "word_embed_proj_dim": 36}
    assert {key: keys[key] for key in wanted} == wanted
    assert "model.decoder.final_layer_norm.weight" not in load_file(tmp_path / "out" / "model.safetensors")
