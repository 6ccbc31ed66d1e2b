"""`shardwise info`: parts that add up, costs from the shapes, what the tokenizer does."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
from tests.tiny import write_llama

from shardwise.cli.main import main
from shardwise.families import config_from_hf
from shardwise.families.presets import PRESETS, preset
from shardwise.models.flops import active_parameter_count, keys_seen, parameter_count
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.planner.info import costs, describe, part_of


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "bloom-176b", "opt-350m", "roberta-base",
                                  "gemma3-4b", "gpt-j-6b", "pythia-12b"])  # fmt: skip
def test_every_parameter_belongs_to_a_part_that_has_a_name(name: str) -> None:
    plan = plan_model(config_from_hf(preset(name)), MeshSpec())
    parts = {part_of(d) for d in plan.decisions}
    assert {"embeddings", "attention", "feed-forward", "norms"} <= parts
    assert ("other" in parts) == (name == "opt-350m")  # its two projections


def test_a_token_of_mixtral_meets_two_of_eight_experts() -> None:
    config = config_from_hf(preset("mixtral-8x7b"))
    plan = plan_model(config, MeshSpec())
    experts = config.num_layers * 8 * 3 * config.mlp_dim * config.embed_dim
    assert active_parameter_count(plan) == parameter_count(plan) - experts * 6 // 8


def test_keys_seen_follow_windows_and_direction() -> None:
    gemma, roberta = (config_from_hf(preset(name)) for name in ("gemma2-2b", "roberta-base"))
    seen = sum(min(position + 1, window or math.inf) for window in gemma.windows for position in range(6000))
    assert keys_seen(gemma, 6000) == pytest.approx(seen / 6000, rel=1e-12)
    assert keys_seen(roberta, 512) == 12 * 512


def test_the_cache_of_llama3_8b_is_128_kib_a_token_in_bfloat16() -> None:
    plan = plan_model(config_from_hf(preset("llama3-8b")), MeshSpec())  # 2 · 32 layers · 8 heads · 128 · 2 B
    assert any("128.00 KiB in bfloat16" in line for line in costs(plan))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_described(name: str) -> None:
    config = config_from_hf(preset(name))
    assert config.family in next(describe(config))


def test_the_command_says_what_the_tokenizer_adds_and_where_answers_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(write_llama(tmp_path / "model"))]) == 0
    out = capsys.readouterr().out
    assert "BOS '<s>' = 0, EOS '</s>' = 1, PAD '<pad>' = 2" in out
    assert "a text gets <s> in front and nothing behind" in out
    assert "generation ends at '</s>' = 1" in out and "chat template: yes" in out


def test_the_command_warns_in_one_line_of_a_type_that_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # which the tests turn into errors
        assert main(["info", str(write_llama(tmp_path / "model", model_type="lemur"))]) == 0
    assert capsys.readouterr().err.startswith("warning: model_type 'lemur' is not known; its config has")
