"""Presets have the shapes of the published models, shown by their published parameter counts."""

from __future__ import annotations

import math
import re

import pytest

from shardwise.errors import CheckpointError, ConfigError
from shardwise.families import config_from_hf, config_to_hf, get_family
from shardwise.families.base import PARTS
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
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-j-6b": 6_050_882_784,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "xlm-roberta-base": 278_295_186,
    "xlm-roberta-large": 560_142_482,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "phi3-mini": 3_821_079_552,
    "phi3-medium": 13_960_238_080,
    "phi4": 14_659_507_200,
}
"""Of the other presets no count, or none of the text part alone, is published; OPT's larger ones are counted
by transformers (tests/parity/test_preset_sizes.py)."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    config = config_from_hf(preset(name))
    assert parameter_count(plan_model(config, MeshSpec())) == PUBLISHED[name]
    # What padding adds is not counted.
    assert parameter_count(plan_model(config, MeshSpec(fsdp=3, tp=7))) == PUBLISHED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_the_names_of_the_files_tensors_account_for_every_parameter(name: str) -> None:
    config = config_from_hf(preset(name))
    sizes = {**config.sizes(), PARTS: 1}
    total = 0
    for tensor in get_family(config.family).tensor_names(config):
        copies = config.num_layers if "{layer}" in tensor.hf_name else 1
        copies *= config.num_experts if "{expert}" in tensor.hf_name else 1
        total += copies * math.prod(sizes[axis] for dim in tensor.hf_dims for axis in dim)
    assert total == parameter_count(plan_model(config, MeshSpec()))


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
