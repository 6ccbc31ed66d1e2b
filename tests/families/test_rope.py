"""Rotary settings of a config.json: each kind is read in each spelling, written back, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.families.rope import (
    RopeKeys,
    max_position_from_hf,
    max_position_to_hf,
    rope_block_from_hf,
    rope_block_to_hf,
    rope_from_hf,
    rope_to_hf,
)
from shardwise.models.config import RopeConfig

MAX, HEAD = 256, 16
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SHORT, LONG = [1.0 + i / 8 for i in range(8)], [2.0 + i for i in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 64,
}
LONGROPE_FIELDS: dict[str, Any] = {"short_factor": tuple(SHORT), "long_factor": tuple(LONG)}
NEOX = RopeKeys(theta="rotary_emb_base", partial="rotary_pct", default_partial=0.25)

ONE_OF_EACH = [
    RopeConfig(theta=5e5),
    RopeConfig("linear", 3e4, 2.5),
    RopeConfig("dynamic", 1e4, 4.0, original_max_position=MAX),
    RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 64),
    RopeConfig("yarn", 1e4, 4.0, original_max_position=64),
    RopeConfig(
        "yarn", 1e4, 4.0, original_max_position=64, attention_factor=1.2, beta_fast=16.0, beta_slow=2.0,
        mscale=0.7, mscale_all_dim=0.9, truncate=False,
    ),
    RopeConfig("longrope", 1e4, 4.0, original_max_position=64, **LONGROPE_FIELDS),
    RopeConfig("longrope", 1e4, 4.0, original_max_position=64, attention_factor=1.5, **LONGROPE_FIELDS),
]  # fmt: skip
each_kind = pytest.mark.parametrize("rope", ONE_OF_EACH, ids=lambda rope: rope.kind)


def read(**keys: Any) -> RopeConfig:
    return rope_from_hf({"model_type": "llama", **keys}, MAX, HEAD)


@pytest.mark.parametrize(
    ("block", "rope"),
    [
        ({"rope_type": "default"}, RopeConfig()),
        ({"rope_type": "linear", "factor": 2}, RopeConfig("linear", factor=2.0)),
        (
            {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 64},
            RopeConfig("linear", factor=2.0),
        ),
        (
            {"rope_type": "dynamic", "factor": 2.0},
            RopeConfig("dynamic", factor=2.0, original_max_position=MAX),
        ),
        (LLAMA3, RopeConfig("llama3", 1e4, 8.0, 1.0, 4.0, 64)),
        (
            {key: LLAMA3[key] for key in LLAMA3 if "original" not in key},
            RopeConfig("llama3", 1e4, 8.0, 1.0, 4.0, MAX),
        ),
        (YARN, RopeConfig("yarn", factor=4.0, original_max_position=64)),
        ({"rope_type": "yarn", "factor": 4}, RopeConfig("yarn", factor=4.0, original_max_position=MAX)),
        (
            {**YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 1, "mscale_all_dim": 0, "truncate": False},
            RopeConfig(
                "yarn", factor=4.0, original_max_position=64, beta_fast=16.0, beta_slow=2.0, mscale=1.0,
                truncate=False,
            ),
        ),
        (
            {**YARN, "attention_factor": 1.2, "beta_fast": None, "mscale": None},
            RopeConfig("yarn", factor=4.0, original_max_position=64, attention_factor=1.2),
        ),
        (LONGROPE, RopeConfig("longrope", factor=MAX / 64, original_max_position=64, **LONGROPE_FIELDS)),
        (
            {**LONGROPE, "factor": 2.0, "attention_factor": 1.5},
            RopeConfig(
                "longrope", factor=2.0, original_max_position=64, attention_factor=1.5, **LONGROPE_FIELDS
            ),
        ),
    ],
)  # fmt: skip
def test_every_kind_is_read_in_every_spelling(block: dict[str, Any], rope: RopeConfig) -> None:
    kind = block["rope_type"]
    legacy = {"type" if key == "rope_type" else key: value for key, value in block.items()}
    with_theta = replace(rope, theta=5e5)
    for spelled in (block, legacy, {**block, "type": kind}):
        assert read(rope_scaling=spelled) == rope
        assert read(rope_parameters=spelled) == rope
        assert read(rope_theta=500000, rope_scaling=spelled) == with_theta
        assert read(rope_theta=500000, rope_parameters=spelled) == with_theta
        assert read(rope_parameters={**spelled, "rope_theta": 5e5}) == with_theta
        assert read(rope_theta=5e5, rope_parameters={**spelled, "rope_theta": 500000}) == with_theta
        both = {"rope_scaling": spelled, "rope_parameters": {**spelled, "rope_theta": 5e5}}
        assert read(rope_theta=5e5, **both) == with_theta


def test_absent_null_and_empty_settings_are_the_default_kind() -> None:
    for keys in ({}, {"rope_scaling": None, "rope_theta": None}, {"rope_parameters": {}, "rope_scaling": {}}):
        assert read(**keys) == RopeConfig(theta=10000.0)
    assert read(rope_scaling={"type": None, "rope_theta": None}) == RopeConfig()


def test_the_old_name_of_longrope_is_read() -> None:
    for key in ("type", "rope_type"):
        block = {name: value for name, value in LONGROPE.items() if name != "rope_type"}
        assert read(rope_scaling={**block, key: "su"}) == read(rope_scaling=LONGROPE)


def test_an_original_length_outside_of_the_block_counts_as_in_phi3() -> None:
    inside = {name: value for name, value in LONGROPE.items() if "original" not in name}
    assert read(rope_scaling=inside, original_max_position_embeddings=64) == read(rope_scaling=LONGROPE)
    assert read(rope_scaling=LONGROPE, original_max_position_embeddings=64) == read(rope_scaling=LONGROPE)
    filled_in = {**inside, "original_max_position_embeddings": MAX}  # by transformers, which then ignores it
    assert read(rope_scaling=filled_in, original_max_position_embeddings=64) == read(rope_scaling=LONGROPE)


@each_kind
def test_written_settings_are_read_back_the_same_from_both_spellings_and_from_each(rope: RopeConfig) -> None:
    out = rope_to_hf(rope, MAX, HEAD)
    assert out["rope_theta"] == rope.theta
    assert out["rope_parameters"]["rope_type"] == rope.kind
    assert out["rope_parameters"] == {
        "rope_theta": rope.theta, **(out["rope_scaling"] or {"rope_type": "default"})
    }  # fmt: skip
    assert read(**out) == rope
    assert read(rope_parameters=out["rope_parameters"]) == rope
    del out["rope_parameters"]
    assert read(**out) == rope


def test_the_blocks_of_llama3_and_linear_have_their_numbers_and_no_more() -> None:
    """Case C105."""
    assert rope_to_hf(RopeConfig("llama3", 500000.0, 8.0, 1.0, 4.0, 64), MAX, HEAD) == {
        "rope_theta": 500000,
        "rope_scaling": LLAMA3,
        "rope_parameters": {**LLAMA3, "rope_theta": 500000},
    }
    linear = rope_to_hf(RopeConfig("linear", factor=2.0), MAX, HEAD)
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 2}


def test_longrope_is_written_so_that_transformers_4_finds_the_same_scaling() -> None:
    """It reads the original length outside of the block alone, and takes max / original for the factor."""
    for factor in (4.0, 2.0):
        rope = RopeConfig("longrope", factor=factor, original_max_position=64, **LONGROPE_FIELDS)
        out = rope_to_hf(rope, MAX, HEAD)
        assert out["original_max_position_embeddings"] == 64
        as_read = replace(rope, factor=MAX / 64, attention_factor=out["rope_scaling"].get("attention_factor"))
        assert as_read.attention_scaling == rope.attention_scaling
        assert rope_from_hf(out, MAX, HEAD).attention_scaling == rope.attention_scaling


@each_kind
def test_one_layer_types_block_is_read_and_written(rope: RopeConfig) -> None:
    block = rope_block_to_hf(rope, MAX, HEAD)
    assert rope_block_from_hf(block, MAX, HEAD, "rope_parameters.full_attention") == rope


def test_the_part_of_a_head_that_turns_is_read_from_the_familys_key_from_the_block_and_by_default() -> None:
    quarter, half = RopeConfig(theta=3e4, rotary_dim=4), RopeConfig(theta=3e4, rotary_dim=8)
    for hf, rope in (
        ({"rotary_emb_base": 30000}, quarter),
        ({"rotary_emb_base": 30000, "rotary_pct": 0.5}, half),
        ({"rope_parameters": {"rope_theta": 3e4, "partial_rotary_factor": 0.5}}, half),
        ({"rotary_emb_base": 30000, "rotary_pct": 1}, RopeConfig(theta=3e4)),
    ):
        assert rope_from_hf(hf, MAX, HEAD, NEOX) == rope


@pytest.mark.parametrize("width", [4, 8, None])
@pytest.mark.parametrize("kind", ["default", "linear"])
def test_the_part_of_a_head_that_turns_is_written_in_both_spellings(kind: Any, width: int | None) -> None:
    rope = RopeConfig(kind, 3e4, rotary_dim=width)
    out = rope_to_hf(rope, MAX, HEAD, NEOX)
    assert (out["rotary_emb_base"], out["rotary_pct"]) == (3e4, (width or HEAD) / HEAD)
    assert rope_from_hf(out, MAX, HEAD, NEOX) == rope
    del out["rope_parameters"]
    assert rope_from_hf(out, MAX, HEAD, NEOX) == rope


def test_every_number_of_turning_features_survives_the_fraction_that_files_have_for_it() -> None:
    for head_dim in range(2, 130, 2):
        for width in range(2, head_dim + 1, 2):
            block = rope_block_to_hf(RopeConfig(rotary_dim=width), MAX, head_dim)
            assert int(head_dim * block.get("partial_rotary_factor", 1.0)) == width


def test_longrope_has_one_factor_for_each_pair_that_turns() -> None:
    keys = RopeKeys(partial="partial_rotary_factor")
    half = {**LONGROPE, "short_factor": SHORT[:4], "long_factor": LONG[:4]}
    assert rope_from_hf(
        {"partial_rotary_factor": 0.5, "rope_scaling": half}, MAX, HEAD, keys
    ).short_factor == tuple(SHORT[:4])
    with pytest.raises(ConfigError, match="short_factor has 8 numbers; it must have 4"):
        rope_from_hf({"partial_rotary_factor": 0.5, "rope_scaling": LONGROPE}, MAX, HEAD, keys)


@pytest.mark.parametrize(
    ("rope", "stated", "context"),
    [
        (RopeConfig("linear", factor=4.0), 2048, 2048),
        (RopeConfig("dynamic", factor=4.0, original_max_position=2048), 2048, 8192),
        (RopeConfig("yarn", factor=4.0, original_max_position=32768), 32768, 131072),
        (RopeConfig("yarn", factor=4.0, original_max_position=32768), 131072, 131072),
    ],
)
def test_context_is_what_dynamic_and_yarn_stretch_to(rope: RopeConfig, stated: int, context: int) -> None:
    assert max_position_from_hf(rope, stated) == context
    assert max_position_from_hf(rope, max_position_to_hf(rope, context)) == context


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"rope_scaling": {"rope_type": "mrope", "factor": 2.0}},
        "rope type 'mrope' is not supported; supported: default, linear, dynamic, llama3, yarn, longrope",
    ),
    ({"rope_scaling": {"type": ["yarn"]}}, "rope type ['yarn'] is not supported"),
    ({"rope_scaling": {"type": "yarn", "rope_type": "linear"}}, "rope_type 'linear' and rope_scaling.type"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected keys and values"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "rotary keys ['beta']"),
    ({"rope_scaling": {**YARN, "short_factor": SHORT}}, "rotary keys ['short_factor'] in rope_scaling"),
    ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "rotary keys ['factor'] in rope_parame"),
    ({"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}, "rotary keys ['llama_4_scaling_beta']"),
    ({"rope_scaling": {"rope_type": "linear"}}, "has no 'factor', which rope type 'linear' needs"),
    ({"rope_scaling": {**YARN, "factor": None}}, "has no 'factor', which rope type 'yarn' needs"),
    ({"rope_scaling": {"type": "longrope", "short_factor": SHORT}}, "has no 'long_factor'"),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "has no 'low_freq_factor'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0.0; it must be a number above 0"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": "2"}}, "factor is '2'; expected float"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "low_freq_factor 1.0 must be below high_freq"),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": 0}}, "low_freq_factor is 0.0; it must be a number above"),
    ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0}}, "original_max_position_embeddings"),
    ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64.5}}, "64.5; expected int"),
    ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, "beta_slow 1.0, beta_fast 0.5"),
    ({"rope_scaling": {**YARN, "beta_slow": 0}}, "beta_slow is 0.0"),
    ({"rope_scaling": {**YARN, "attention_factor": -1.0}}, "attention_factor is -1.0"),
    ({"rope_scaling": {**YARN, "mscale": -1.0}}, "mscale is -1.0"),
    ({"rope_scaling": {**YARN, "truncate": "no"}}, "truncate is 'no'; expected bool"),
    ({"rope_theta": 1, "rope_scaling": YARN}, "needs rope_theta above 1"),
    ({"rope_scaling": {**LONGROPE, "short_factor": SHORT[:7]}}, "short_factor has 7 numbers; it must have 8"),
    (
        {"rope_scaling": {**LONGROPE, "long_factor": [*LONG, 1.0]}},
        "long_factor has 9 numbers; it must have 8",
    ),
    ({"rope_scaling": {**LONGROPE, "long_factor": 2.0}}, "long_factor is 2.0; expected list"),
    (
        {"rope_scaling": {**LONGROPE, "long_factor": [*LONG[:7], "1"]}},
        "long_factor[7] is '1'; expected float",
    ),
    ({"rope_scaling": {**LONGROPE, "long_factor": [*LONG[:7], 0]}}, "long_factor[7] is 0.0"),
    ({"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1}}, "of at least 2, not 1"),
    ({"rope_theta": -1.0}, "rope_theta is -1.0"),
    ({"rope_theta": "big"}, "rope_theta is 'big'; expected float"),
    ({"rope_theta": float("inf")}, "rope_theta is inf; expected a finite number"),
    ({"rope_theta": 2.0, "rope_parameters": {"rope_theta": 3.0}}, "2.0 and rope_parameters.rope_theta 3.0"),
    ({"rope_theta": 2.0, "rope_scaling": {"rope_theta": 3.0}}, "2.0 and rope_scaling.rope_theta 3.0"),
    (
        {"original_max_position_embeddings": 32, "rope_scaling": YARN},
        "32 and rope_scaling.original_max_position_embeddings 64 disagree",
    ),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}},
        "64 with rope type 'dynamic' differs from max_position_embeddings 256",
    ),
    (
        {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 8.0}},
        "rope_parameters and rope_scaling disagree on factor (8.0 and 4.0)",
    ),
    (
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}},
        "rope_parameters and rope_scaling disagree on kind (default and yarn)",
    ),
    (
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}},
        "a block for each type of layer (full_attention, sliding_attention)",
    ),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "lets 8 of a head's 16 features turn"),
    ({"partial_rotary_factor": 0.5}, "lets 8 of a head's 16 features turn"),
    ({"partial_rotary_factor": 0.0}, "partial_rotary_factor is 0.0; it must be above 0 and at most 1"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
    ({"partial_rotary_factor": 0.2}, "3 features turn; it must be an even number above 0"),
]


@pytest.mark.parametrize(("keys", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_name(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**keys)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_that_a_file_cannot_say_are_not_written() -> None:
    with pytest.raises(ConfigError, match="8 of 16 features"):
        rope_to_hf(RopeConfig(rotary_dim=8), MAX, HEAD)
    dynamic = RopeConfig("dynamic", factor=2.0, original_max_position=64)
    with pytest.raises(ConfigError, match="stretches beyond 64 tokens"):
        rope_to_hf(dynamic, MAX, HEAD)
    with pytest.raises(ConfigError, match="cannot say a context of 256 tokens"):
        max_position_to_hf(dynamic, 256)
    with pytest.raises(ConfigError, match="32 features turn, but a head has only 16"):
        rope_to_hf(RopeConfig(rotary_dim=32), MAX, HEAD)


def test_a_kind_that_does_not_exist_cannot_be_built() -> None:
    with pytest.raises(ConfigError, match="rope type 'xpos' is not supported; supported: default, linear"):
        RopeConfig("xpos")  # type: ignore[arg-type]
