"""Configs that no family here was made for, and cases from public bug reports that a config alone shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.parity.conftest import load_on
from tests.parity.families import all_cases
from tests.parity.family_cases import inputs, model_config, write_checkpoint
from tests.tiny import write_llama

from shardwise.errors import CheckpointError, ConfigError
from shardwise.families import config_from_hf, config_to_hf
from shardwise.families.presets import preset

BY_NAME = {case.name: case for case in all_cases()}


def test_an_unknown_type_of_llamas_form_is_read_as_llama_and_says_so(tmp_path: Path) -> None:
    known = load_on(write_llama(tmp_path / "llama"))
    with pytest.warns(
        UserWarning, match="model_type 'lemur' is not known.*read, computed and exported as Llama"
    ):
        unknown = load_on(write_llama(tmp_path / "lemur", model_type="lemur"))
    tokens = np.arange(10)[None]
    assert np.array_equal(known.logits(tokens), unknown.logits(tokens))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel_attn": True}, "it has parallel_attn = True, which Llama has not"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"logit_scale": 0.5, "alibi": True}, "it has logit_scale = 0.5, alibi = True"),
    ],
)
def test_an_unknown_type_that_computes_otherwise_is_refused_by_name(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_on(write_llama(tmp_path / "lemur", model_type="lemur", **changes))


def test_an_unknown_type_whose_tensors_are_others_is_refused_with_their_names(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "lemur", model_type="lemur")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.sinks"] = np.zeros(4, np.float32)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    words = "1 missing: model.norm.weight; 1 unexpected: model.layers.0.self_attn.sinks"
    with pytest.warns(UserWarning, match="lemur"), pytest.raises(CheckpointError, match=words):
        load_on(folder)


def test_keys_that_nobody_read_are_named() -> None:
    with pytest.warns(UserWarning, match="not read for gpt2: made_up = 3"):
        config_from_hf({**preset("gpt2"), "made_up": 3})


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_quantised_checkpoints_are_refused_by_name(method: str, tmp_path: Path) -> None:
    folder = write_checkpoint(BY_NAME["gpt2"], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"quantised \\({method}\\)"):
        load_on(folder)


def test_what_a_family_cannot_say_is_refused_at_export() -> None:
    config = replace(model_config(BY_NAME["gpt2"]), qk_norm=True)
    with pytest.raises(ConfigError, match="a gpt2 config.json cannot say qk_norm True"):
        config_to_hf(config)


def test_names_without_the_base_models_prefix_are_found(tmp_path: Path) -> None:
    folder = write_checkpoint(BY_NAME["bloom"], tmp_path / "prefixed")
    want = load_on(folder).logits(np.arange(9)[None])
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    assert np.array_equal(load_on(folder).logits(np.arange(9)[None]), want)


def test_gemma2_caps_every_logit_and_scales_queries_by_its_own_number(tmp_path: Path) -> None:
    """Case C116."""
    case = BY_NAME["gemma2"]
    tokens = inputs(case)[0].tokens
    capped = load_on(write_checkpoint(case, tmp_path / "24")).logits(tokens)
    assert np.abs(capped).max() < 3.0
    other = replace(case, config={**case.config, "query_pre_attn_scalar": 32})
    assert np.abs(load_on(write_checkpoint(other, tmp_path / "32")).logits(tokens) - capped).max() > 1e-3


def test_qwen3_heads_need_not_split_the_width(tmp_path: Path) -> None:
    """Case C113."""
    case = BY_NAME["qwen3"]  # hidden 48, 4 heads, 2 kv heads, head_dim 16
    tensors = load_file(write_checkpoint(case, tmp_path / "in") / "model.safetensors")
    shapes = [tensors[f"model.layers.0.self_attn.{name}_proj.weight"].shape for name in "qko"]
    assert shapes == [(64, 48), (32, 48), (48, 64)]
    model = load_on(tmp_path / "in")
    assert model.config.score_scale == 16**-0.5
    model.export(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["head_dim"] == 16
