"""shardwise against the stored logits of transformers, with and without cache, on one device and on meshes.

Needs no torch. Not here: exports and live comparisons (test_live.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardwise.errors import CheckpointError
from shardwise.families import config_from_hf
from shardwise.models.positions import inverse_frequencies

from .cases import (
    BY_NAME,
    CASES,
    LLAMA3_SCALING,
    LOGIT_BOUND,
    TIED_IN_TEXT_CONFIG,
    TIED_WITH_COPY,
    TIED_WITH_OTHER_HEAD,
    UNTIED_WITHOUT_HEAD,
    Batch,
    Case,
    golden_logits,
    inputs,
    weight_sums,
)

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)

# Sizes that the mesh does not divide (cases C207 and C208), and one of each kind that it does.
UNEVEN = [
    ("mha_6", "dp:1,fsdp:1,tp:4"),
    ("gqa_6_3", "dp:1,fsdp:1,tp:2"),
    ("gqa_8_2", "dp:1,fsdp:1,tp:4"),
    ("mqa_8_1", "dp:1,fsdp:1,tp:8"),
    ("gqa_9_3", "dp:1,fsdp:2,tp:4"),
    ("both_biases_tied", "dp:1,fsdp:2,tp:3"),
    ("gqa_4_2", "dp:2,fsdp:2,tp:2"),
]


@every_case
def test_goldens_belong_to_the_weights_that_the_seed_gives(case: Case) -> None:
    np.testing.assert_allclose(golden_logits(case)["weight_sums"], weight_sums(case), rtol=1e-6)


@every_case
def test_logits_equal_transformers_plain_padded_and_long(case: Case, load_case: Callable[..., Any]) -> None:
    model, golden = load_case(case), golden_logits(case)
    for batch in inputs(case):
        ours = model.logits(batch.tokens, batch.attention_mask)
        assert ours.dtype == np.float32
        assert ours.shape == (*batch.tokens.shape, case.config["vocab_size"])
        assert_close(ours[batch.keep], golden[batch.name], f"{case.name} {batch.name}")


@every_case
def test_cached_decode_equals_transformers_without_cache(case: Case, load_case: Callable[..., Any]) -> None:
    batch = named(case, "plain")
    ours = load_case(case).cached_logits(batch.tokens, 7)
    assert_close_from(6, batch, ours, golden_logits(case)["plain"], f"{case.name} prefill 7 of 20")


@pytest.mark.parametrize("name", ["gqa_4_2", "rope_linear", "rope_llama3", "rope_theta_500000"])
def test_cached_decode_at_far_positions_equals_transformers(name: str, load_case: Callable[..., Any]) -> None:
    case = BY_NAME[name]
    batch = named(case, "long")
    ours = load_case(case).cached_logits(batch.tokens, 150)
    assert_close_from(149, batch, ours, golden_logits(case)["long"], f"{name} prefill 150 of 200")


@pytest.mark.parametrize("prefill", [1, 19])
def test_cached_decode_does_not_depend_on_where_the_prefill_ends(
    prefill: int, load_case: Callable[..., Any]
) -> None:
    case = BY_NAME["gqa_9_3"]
    batch = named(case, "plain")
    ours = load_case(case).cached_logits(batch.tokens, prefill)
    assert_close_from(prefill - 1, batch, ours, golden_logits(case)["plain"], f"prefill {prefill} of 20")


@pytest.mark.parametrize(("name", "mesh"), UNEVEN)
def test_logits_on_a_mesh_equal_transformers(name: str, mesh: str, load_case: Callable[..., Any]) -> None:
    case = BY_NAME[name]
    model, golden = load_case(case, mesh), golden_logits(case)
    for batch in (named(case, "plain"), named(case, "left_padded")):
        ours = model.logits(batch.tokens, batch.attention_mask)
        assert ours.shape[-1] == case.config["vocab_size"], "padded ids must not reach the caller"
        assert_close(ours[batch.keep], golden[batch.name], f"{name} on {mesh} {batch.name}")


@pytest.mark.parametrize(("name", "mesh"), UNEVEN)
def test_cached_decode_on_a_mesh_equals_transformers(
    name: str, mesh: str, load_case: Callable[..., Any]
) -> None:
    case = BY_NAME[name]
    batch = named(case, "plain")
    ours = load_case(case, mesh).cached_logits(batch.tokens, 12)
    assert_close_from(11, batch, ours, golden_logits(case)["plain"], f"{name} on {mesh}")


# Case C103: the published frequencies; head_dim 16, theta 10000.
LLAMA3_FREQUENCIES = [
    1,
    0.254647909,
    0.0254647909,
    0.00790569415,
    0.0025,
    0.000790569415,
    0.00025,
    7.90569415e-05,
]


@pytest.mark.parametrize("name", ["rope_llama3", "rope_llama3_legacy_type", "rope_llama3_rope_parameters"])
def test_llama3_inverse_frequencies_are_those_published_in_every_spelling(name: str) -> None:
    rope = config_from_hf(BY_NAME[name].config).rope
    np.testing.assert_allclose(inverse_frequencies(rope, 16), LLAMA3_FREQUENCIES, rtol=1e-6)


def test_theta_inside_rope_parameters_is_read() -> None:
    parameters = {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3_SCALING}
    config = {**BY_NAME["rope_llama3_rope_parameters"].config, "rope_parameters": parameters}
    frequencies = inverse_frequencies(config_from_hf(config).rope, 16)
    # The last pair's wavelength is far beyond the original context: theta^(-14/16) divided by the factor.
    assert frequencies[-1] == pytest.approx(500000.0 ** (-14 / 16) / 4, rel=1e-6)


def test_linear_and_default_inverse_frequencies() -> None:
    default = [1, 0.31622777, 0.1, 0.031622777, 0.01, 0.0031622777, 0.001, 0.00031622777]  # 10000^(-i/8)
    rope = config_from_hf(BY_NAME["gqa_4_2"].config).rope
    np.testing.assert_allclose(inverse_frequencies(rope, 16), default, rtol=1e-6)
    rope = config_from_hf(BY_NAME["rope_linear"].config).rope
    np.testing.assert_allclose(inverse_frequencies(rope, 16), np.array(default) / 2, rtol=1e-6)


@pytest.mark.parametrize("case", [TIED_IN_TEXT_CONFIG, TIED_WITH_COPY], ids=lambda case: case.name)
def test_a_tied_model_loads_without_a_word(case: Case, load_case: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load_case(case)
    assert model.config.tie_embeddings
    batch = named(case, "plain")
    assert_close(model.logits(batch.tokens)[batch.keep], golden_logits(case)["plain"], case.name)


@pytest.mark.parametrize("case", [TIED_WITH_OTHER_HEAD, UNTIED_WITHOUT_HEAD], ids=lambda case: case.name)
def test_a_head_that_contradicts_the_config_is_named_and_never_guessed(
    case: Case, load_case: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Case C110 allows two: stop and name the tensor, or warn, name it and use what the file holds."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model, refusal = load_case(case), ""
        except CheckpointError as error:
            model, refusal = None, str(error)
    said = " ".join([refusal, caplog.text, *(str(warning.message) for warning in caught)])
    assert "lm_head.weight" in said
    if model is None:
        return
    batch = named(case, "plain")
    assert_close(model.logits(batch.tokens)[batch.keep], golden_logits(case)["plain"], case.name)


def named(case: Case, name: str) -> Batch:
    """The case's batch called `name`."""
    return next(batch for batch in inputs(case) if batch.name == name)


def assert_close_from(first: int, batch: Batch, ours: np.ndarray, reference: np.ndarray, what: str) -> None:
    """The same for cached logits, which are known from the last prefilled place on."""
    place = np.broadcast_to(np.arange(batch.tokens.shape[1]), batch.tokens.shape)[batch.keep]
    assert (place >= first).sum() >= 2, "nothing is compared"
    assert_close(ours[batch.keep][place >= first], reference[place >= first], what)


def assert_close(ours: np.ndarray, reference: np.ndarray, what: str) -> None:
    """Hold the largest difference to LOGIT_BOUND of the largest reference value; NaN fails."""
    worst, largest = np.abs(ours - reference).max(), np.abs(reference).max()
    assert worst <= LOGIT_BOUND * largest, f"{what}: max|Δ| {worst:.3g} against max|logit| {largest:.3g}"
