"""Presets have the shapes of the published models, shown by their published parameter counts."""

from __future__ import annotations

import math
import re

import pytest

from shardwise.errors import CheckpointError, ConfigError
from shardwise.families import config_from_hf, config_to_hf, get_family
from shardwise.families.presets import PRESETS, preset
from shardwise.models.flops import parameter_count
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec

# Parameters as the safetensors of the hub's repositories have them (a tied head counted once).
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    config = config_from_hf(preset(name))
    assert parameter_count(plan_model(config, MeshSpec())) == PUBLISHED[name]
    # What padding adds is not counted.
    assert parameter_count(plan_model(config, MeshSpec(fsdp=3, tp=7))) == PUBLISHED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_the_names_of_the_files_tensors_account_for_every_parameter(name: str) -> None:
    config = config_from_hf(preset(name))
    sizes = config.sizes()
    total = 0
    for tensor in get_family(config.family).tensor_names(config):
        copies = config.num_layers if "{layer}" in tensor.hf_name else 1
        total += copies * math.prod(sizes[axis] for dim in tensor.hf_dims for axis in dim)
    assert total == PUBLISHED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_translation_to_a_config_json_and_back(name: str) -> None:
    config = config_from_hf(preset(name))
    assert config_from_hf(config_to_hf(config)) == config


def test_an_unknown_preset_is_refused_with_near_ones() -> None:
    with pytest.raises(ConfigError, match=re.escape("no preset is called 'llama3-9b'; nearest: llama3-8b")):
        preset("llama3-9b")


def test_a_preset_has_no_weights_to_load() -> None:
    import shardwise

    with pytest.raises(CheckpointError, match="llama3-8b holds a configuration but no weights"):
        shardwise.load("llama3-8b", mesh="1,1,8")


def test_changing_what_a_preset_returns_does_not_change_the_preset() -> None:
    preset("llama2-7b")["vocab_size"] = 1
    assert preset("llama2-7b")["vocab_size"] == 32000
