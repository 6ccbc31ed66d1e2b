"""What a BLOOM config.json may say, and the names that its files' tensors have.

Not here: logits (tests/parity), meshes and predictions (test_on_meshes.py, tests/planner).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.parity.conftest import load_on
from tests.parity.families.bloom import CASES
from tests.parity.family_cases import golden_logits, inputs, write_checkpoint
from tests.parity.test_goldens import assert_close

from shardwise.errors import ConfigError
from shardwise.families import config_from_hf, config_to_hf
from shardwise.models.attention import alibi_slopes

CASE = CASES[0]
CONFIG = dict(CASE.config)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("hidden_size", "n_embed"), ("n_head", "num_attention_heads"), ("n_layer", "num_hidden_layers")],
)
def test_sizes_are_read_under_both_of_their_names(ours: str, theirs: str) -> None:
    renamed = {theirs if key == ours else key: value for key, value in CONFIG.items()}
    assert config_from_hf(renamed) == config_from_hf(CONFIG)


@pytest.mark.parametrize(
    ("key", "value"),
    [("apply_residual_connection_post_layernorm", True), ("n_inner", 100), ("offset_alibi", 50)],
)
def test_what_would_change_the_result_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^config.json: {key} = {value} changes the computation.*[^\n]$"):
        config_from_hf({**CONFIG, key: value})


@pytest.mark.filterwarnings("error")
def test_what_the_training_code_was_told_is_passed_over() -> None:
    more = {
        "slow_but_exact": True, "pretraining_tp": 4, "attention_softmax_in_fp32": True, "offset_alibi": 100,
        "apply_residual_connection_post_layernorm": False, "masked_softmax_fusion": True, "n_inner": None,
        "skip_bias_add": True, "skip_bias_add_qkv": False, "bias_dropout_fusion": True, "seq_length": 2048,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "unk_token_id": 0, "initializer_range": 0.02,
    }  # fmt: skip
    assert config_from_hf({**CONFIG, **more}) == config_from_hf(CONFIG)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_config_survives_translation_and_back(case: Any) -> None:
    config = config_from_hf(case.config)
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize("head", [False, True], ids=["", "with the tied head written out"])
def test_a_file_without_transformer_in_front_of_its_names_gives_the_same_logits(
    head: bool, tmp_path: Path
) -> None:
    write_checkpoint(CASE, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): array for name, array in load_file(file).items()}
    if head:
        tensors["lm_head.weight"] = tensors["word_embeddings.weight"].copy()
    save_file(tensors, file)
    batch = inputs(CASE)[0]
    assert_close(load_on(tmp_path).logits(batch.tokens)[batch.keep], golden_logits(CASE)["plain"], "plain")


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 25, 112])
def test_alibi_slopes_are_those_of_the_paper_and_for_other_numbers_of_its_code(heads: int) -> None:
    """Press et al. 2022, §3: a geometric sequence that begins at 2^(−8/n) with that ratio; for other n the
    closest smaller power's sequence, then every other one of the next power's."""

    def sequence(n: int) -> list[float]:
        ratio = 2 ** (-8 / n)
        return [ratio * ratio**i for i in range(n)]

    power = max(n for n in (1, 2, 4, 8, 16, 32, 64) if n <= heads)
    wanted = [*sequence(power), *sequence(2 * power)[::2]][:heads]
    # at most `power` multiplications, each rounded by half a unit in the last place
    np.testing.assert_allclose(alibi_slopes(heads), wanted, rtol=128 * np.finfo(np.float64).eps)


def test_a_context_is_written_where_older_readers_find_it(tmp_path: Path) -> None:
    config = config_from_hf({**CONFIG, "seq_length": 96})
    assert config.max_position == 96
    assert json.loads(json.dumps(config_to_hf(config)))["seq_length"] == 96
