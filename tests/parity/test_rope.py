"""Rotary embedding of every kind against the installed transformers, live: cosines, logits and exports.

Run with `-m parity` in an interpreter that has torch. Not here: frequencies against the published formulas
(tests/models/test_positions.py) and spellings (tests/families/test_rope.py). transformers takes one length
for a whole batch and keeps the longest it has seen, so that the reference is always a new model on one row.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from shardwise.families.rope import WHOLE_HEADS, RopeKeys, rope_from_hf, rope_to_hf
from shardwise.models.positions import document_lengths, rotate, rotation

from .cases import BY_NAME, LOGIT_BOUND, Case
from .conftest import load_on

torch = pytest.importorskip(
    "torch", reason="torch is not installed: the live comparison needs torch and transformers"
)

from transformers import GPTNeoXConfig, LlamaConfig, Phi3Config  # noqa: E402  (needs torch)
from transformers.models.gpt_neox import modeling_gpt_neox  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.models.phi3 import modeling_phi3  # noqa: E402

from .make_goldens import load_reference, reference_logits  # noqa: E402

pytestmark = pytest.mark.parity

MAX, HEADS, HEAD_DIM = 256, 4, 16
SHORT, LONG = [1.0 + i / 8 for i in range(8)], [1.5 + 3.0 * i for i in range(8)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 32}

# Keys of config.json. Kinds that depend on the length change at 64.
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 500000.0},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {"rope_scaling": YARN},
    "yarn_attention_1": {"rope_scaling": {**YARN, "attention_factor": 1.0}},
    "yarn_attention_1_2": {"rope_scaling": {**YARN, "attention_factor": 1.2}},
    "yarn_mscale": {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}},
    "yarn_betas": {"rope_theta": 3e4, "rope_scaling": {**YARN, "beta_fast": 4, "beta_slow": 0.25}},
    "yarn_untruncated": {"rope_scaling": {**YARN, "truncate": False}},
    "yarn_no_original": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "longrope": {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 64}},
    "longrope_outer_original": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64},
    "longrope_factor": {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 64, "factor": 2.0}},
    "longrope_attention": {
        "rope_scaling": {**LONGROPE, "original_max_position_embeddings": 64, "attention_factor": 1.25}
    },
}
every_kind = pytest.mark.parametrize("keys", KINDS.values(), ids=KINDS)
every_length = pytest.mark.parametrize("length", [40, 64, 65, 200])


def settings(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys of a config.json around the rotary ones, as all three config classes take them."""
    sizes = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "num_key_value_heads": 2}
    return {"max_position_embeddings": MAX, **sizes, **json.loads(json.dumps(keys))}


def our_rotation(hf: dict[str, Any], length: int, keys: RopeKeys = WHOLE_HEADS) -> tuple[Any, Any]:
    """cos, sin [1, length, R/2] of one document that begins at position 0."""
    rope = rope_from_hf(hf, hf["max_position_embeddings"], HEAD_DIM, keys)
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    lengths = document_lengths(positions, jnp.ones_like(positions))
    return rotation(rope, HEAD_DIM, positions, jnp.float32, lengths)


def assert_equal_rotation(ours: tuple[Any, Any], module: torch.nn.Module, length: int) -> None:
    """Compare with transformers' module at the positions 0 to length - 1; it has each angle twice."""
    theirs = module(torch.zeros(1), torch.arange(length)[None])
    for name, our, their in zip(("cos", "sin"), ours, theirs, strict=True):
        reference = their.numpy()[..., : our.shape[-1]]
        assert their.shape[-1] == 2 * our.shape[-1]
        worst, largest = np.abs(np.asarray(our) - reference).max(), np.abs(reference).max()
        assert worst <= 1e-4 * largest, f"{name}: max|Δ| {worst:.3g} against {largest:.3g}"


@every_length
@every_kind
def test_cosines_and_sines_of_llama(keys: dict[str, Any], length: int) -> None:
    module = modeling_llama.LlamaRotaryEmbedding(LlamaConfig(**settings(keys)))
    assert_equal_rotation(our_rotation(settings(keys), length), module, length)


@every_length
@every_kind
def test_what_we_write_means_the_same_to_transformers(keys: dict[str, Any], length: int) -> None:
    """Both spellings at once, and the old one alone."""
    hf = settings(keys)
    stated = hf["max_position_embeddings"]
    out = rope_to_hf(rope_from_hf(hf, stated, HEAD_DIM), stated, HEAD_DIM)
    old = {key: value for key, value in out.items() if key != "rope_parameters"}
    for written in (out, old):
        config = LlamaConfig(**settings({"max_position_embeddings": stated, **written}))
        assert_equal_rotation(our_rotation(hf, length), modeling_llama.LlamaRotaryEmbedding(config), length)


@every_kind
def test_what_transformers_writes_means_the_same_to_us(keys: dict[str, Any]) -> None:
    hf = settings(keys)
    written = json.loads(LlamaConfig(**settings(keys)).to_json_string(use_diff=False))
    for length in (40, 200):
        for one, two in zip(our_rotation(written, length), our_rotation(hf, length), strict=True):
            np.testing.assert_array_equal(one, two)


@every_length
@pytest.mark.parametrize(
    "keys",
    [
        {"rotary_pct": 0.25},
        {"rotary_emb_base": 500.0, "rotary_pct": 0.5},
        {
            "rotary_pct": 0.75,
            "rope_scaling": {"type": "dynamic", "factor": 4.0},
            "max_position_embeddings": 64,
        },
        {"rotary_pct": 0.5, "rope_scaling": YARN},
        {},
    ],
    ids=str,
)
def test_the_part_of_gpt_neox_that_turns(keys: dict[str, Any], length: int) -> None:
    names = RopeKeys(theta="rotary_emb_base", partial="rotary_pct", default_partial=0.25)
    config = GPTNeoXConfig(**settings(keys))
    cos_sin = our_rotation(settings(keys), length, names)
    module = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)
    assert_equal_rotation(cos_sin, module, length)
    for one, two in zip(our_rotation(config.to_dict(), length, names), cos_sin, strict=True):
        np.testing.assert_array_equal(one, two)
    stated = settings(keys)["max_position_embeddings"]
    rope = rope_from_hf(settings(keys), stated, HEAD_DIM, names)
    written = settings({"max_position_embeddings": stated, **rope_to_hf(rope, stated, HEAD_DIM, names)})
    again = modeling_gpt_neox.GPTNeoXRotaryEmbedding(GPTNeoXConfig(**written))
    assert_equal_rotation(cos_sin, again, length)
    x = np.random.default_rng(0).normal(size=(1, length, HEADS, HEAD_DIM)).astype(np.float32)
    theirs, _ = modeling_gpt_neox.apply_rotary_pos_emb(
        torch.from_numpy(x), torch.from_numpy(x), *module(torch.zeros(1), torch.arange(length)[None]), 2
    )
    ours = np.asarray(rotate(jnp.asarray(x), cos_sin))
    assert np.abs(ours - theirs.numpy()).max() <= 1e-4 * np.abs(x).max()


@every_length
def test_longrope_on_a_part_of_the_head_as_in_phi3(length: int) -> None:
    scaling = {"type": "longrope", "short_factor": SHORT[:6], "long_factor": LONG[:6]}
    keys = {"partial_rotary_factor": 0.75, "rope_scaling": scaling, "original_max_position_embeddings": 64}
    names = RopeKeys(partial="partial_rotary_factor")
    ours, config = our_rotation(settings(keys), length, names), Phi3Config(**settings(keys))
    assert_equal_rotation(ours, modeling_phi3.Phi3RotaryEmbedding(config), length)
    for one, two in zip(our_rotation(config.to_dict(), length, names), ours, strict=True):
        np.testing.assert_array_equal(one, two)
    written = rope_to_hf(rope_from_hf(settings(keys), MAX, HEAD_DIM, names), MAX, HEAD_DIM, names)
    assert_equal_rotation(ours, modeling_phi3.Phi3RotaryEmbedding(Phi3Config(**settings(written))), length)


LOGIT_KINDS = ("linear", "dynamic", "llama3", "yarn", "yarn_mscale", "yarn_attention_1_2", "longrope")
LOGIT_CASES = [
    replace(BY_NAME["gqa_4_2"], name=name, seed=70_000 + i, config=BY_NAME["gqa_4_2"].config | KINDS[name])
    for i, name in enumerate((*LOGIT_KINDS, "longrope_factor"))
]
every_case = pytest.mark.parametrize("case", LOGIT_CASES, ids=lambda case: case.name)


@every_case
def test_logits_of_short_and_long_rows_in_one_padded_batch_are_those_of_each_row_alone(
    case: Case, case_folder: Callable[[Case], Path], load_case: Callable[..., Any]
) -> None:
    lengths = (40, 200, 65)
    tokens = np.random.default_rng(case.seed).integers(0, 101, (3, 200)).astype(np.int32)
    for left in (False, True):
        mask = np.array([[200 - n <= at if left else at < n for at in range(200)] for n in lengths], np.int32)
        ours = load_case(case).logits(tokens, mask)
        for row, real in enumerate(mask.astype(bool)):
            alone = reference_logits(load_reference(case_folder(case)), tokens[row : row + 1, real])[0]
            worst, largest = np.abs(ours[row, real] - alone).max(), np.abs(alone).max()
            assert worst <= LOGIT_BOUND * largest, f"row {row}: max|Δ| {worst:.3g} against {largest:.3g}"


@every_case
def test_export_reloads_in_transformers_with_the_same_logits(
    case: Case, load_case: Callable[..., Any], tmp_path: Path
) -> None:
    model = load_case(case)
    model.export(tmp_path / "out")
    assert load_on(tmp_path / "out").config.rope.attention_scaling == model.config.rope.attention_scaling
    tokens = np.random.default_rng(case.seed).integers(0, 101, (1, 200)).astype(np.int32)
    for length in (40, 200):
        theirs = reference_logits(load_reference(tmp_path / "out"), tokens[:, :length])
        worst = np.abs(model.logits(tokens[:, :length]) - theirs).max()
        assert worst <= LOGIT_BOUND * np.abs(theirs).max()
