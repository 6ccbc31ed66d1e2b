"""Rotary embedding: frequencies of each scaling against the published formulas; what defines the rotation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.tiny import write_llama

import shardwise
from shardwise.errors import ConfigError
from shardwise.models.config import RopeConfig
from shardwise.models.positions import document_lengths, inverse_frequencies, rotate, rotation

SHORT, LONG = (1.0, 1.1, 1.5, 2.0), (1.5, 3.0, 8.0, 20.0)
DYNAMIC = RopeConfig("dynamic", factor=4.0, original_max_position=64)
LONGROPE = RopeConfig("longrope", factor=4.0, original_max_position=64, short_factor=SHORT, long_factor=LONG)


def test_default_frequencies_are_a_geometric_sequence_from_one() -> None:
    got = inverse_frequencies(RopeConfig(theta=500000.0), 8)
    np.testing.assert_allclose(got, [500000.0 ** (-i / 8) for i in (0, 2, 4, 6)], rtol=1e-15)


def test_linear_scaling_divides_every_frequency() -> None:
    plain, scaled = (inverse_frequencies(r, 8) for r in (RopeConfig(), RopeConfig("linear", factor=4.0)))
    np.testing.assert_allclose(scaled, plain / 4, rtol=1e-15)


def test_llama3_scaling_keeps_short_waves_stretches_long_ones_and_blends_between() -> None:
    rope = RopeConfig("llama3", 500000.0, 8.0, 1.0, 4.0, 8192)
    got = inverse_frequencies(rope, 128)
    seen = set()
    for frequency, plain in zip(got, inverse_frequencies(RopeConfig(theta=500000.0), 128), strict=True):
        # As Llama 3.1's release computes it, from the wavelength.
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4.0:
            seen.add("kept")
            want = plain
        elif wavelength > 8192 / 1.0:
            seen.add("stretched")
            want = plain / 8.0
        else:
            seen.add("blended")
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            want = (1 - smooth) * plain / 8.0 + smooth * plain
        assert frequency == pytest.approx(want, rel=1e-14)
    assert seen == {"kept", "stretched", "blended"}


def test_the_product_of_turned_vectors_depends_on_their_distance_alone() -> None:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def product(at: int, other: int) -> float:
        turned = [
            rotate(x, rotation(RopeConfig(), 8, jnp.asarray([[position]]), jnp.float32))
            for x, position in ((q, at), (k, other))
        ]
        return float(jnp.vdot(*turned))

    # float32 angles up to 40 are known to 40·2⁻²⁴; eight terms of order 1
    assert product(7, 3) == pytest.approx(product(40, 36), abs=1e-4)
    assert abs(product(7, 3) - product(7, 4)) > 1e-2
    assert product(5, 5) == pytest.approx(float(jnp.vdot(q, k)), abs=1e-5)


def test_feature_i_turns_with_feature_i_plus_half_in_every_head() -> None:
    x = jnp.zeros((1, 1, 2, 3, 4)).at[..., 0].set(1.0)
    turned = rotate(x, rotation(RopeConfig(), 4, jnp.asarray([[2]]), jnp.float32))
    want = np.broadcast_to([math.cos(2), 0, math.sin(2), 0], (1, 1, 2, 3, 4))
    np.testing.assert_allclose(turned, want, atol=1e-6)


@pytest.mark.parametrize(
    ("head_dim", "changes"),
    [
        (128, {"theta": 1e6, "factor": 4.0, "original_max_position": 32768}),  # Qwen2.5's recipe
        (64, {"theta": 1e4, "factor": 40.0, "original_max_position": 4096}),  # DeepSeek-V2
        (64, {"theta": 15e4, "factor": 32.0, "original_max_position": 4096, "truncate": False}),  # gpt-oss
        (16, {"theta": 1e4, "factor": 40.0, "original_max_position": 32}),  # case C106
        (16, {"theta": 1e4, "factor": 8.0, "original_max_position": 64, "beta_fast": 3.0, "beta_slow": 2.0}),
        # the upper bound is beyond the head: 16.8 of 8 pairs, cut to 15
        (16, {"theta": 1e2, "factor": 8.0, "original_max_position": 10**5, "beta_fast": 1e3}),
    ],
)
def test_yarn_blends_kept_and_stretched_frequencies_by_parts(head_dim: int, changes: dict[str, Any]) -> None:
    rope = RopeConfig("yarn", **changes)
    got = inverse_frequencies(rope, head_dim)
    # Peng et al. 2023: the pair d turns L / λ_d times, λ_d = 2π·theta^(2d/R); solved for d at both betas.
    d_fast, d_slow = (
        head_dim / 2 * math.log(rope.original_max_position / (2 * math.pi * beta), rope.theta)
        for beta in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        d_fast, d_slow = math.floor(d_fast), math.ceil(d_slow)
    d_fast, d_slow = max(d_fast, 0), min(d_slow, head_dim - 1)
    kinds = set()
    for d, frequency in enumerate(got):
        plain = rope.theta ** (-2 * d / head_dim)
        stretched = min(max((d - d_fast) / (d_slow - d_fast), 0), 1)
        kinds.add("kept" if stretched == 0 else "stretched" if stretched == 1 else "blended")
        assert frequency == pytest.approx(
            (1 - stretched) * plain + stretched * plain / rope.factor, rel=1e-12
        )
    beyond = rope.theta == 1e2
    assert kinds >= ({"kept", "blended"} if beyond else {"kept", "stretched"})


def test_yarn_with_equal_bounds_switches_at_them() -> None:
    # 1 turn is at the index 8·ln(64/2π)/ln(1e4) = 2.016, the same for both betas without rounding
    rope = RopeConfig(
        "yarn", factor=8.0, original_max_position=64, beta_fast=1.0, beta_slow=1.0, truncate=False
    )
    ratio = inverse_frequencies(RopeConfig(), 16) / inverse_frequencies(rope, 16)
    np.testing.assert_allclose(ratio, [1, 1, 1, 8, 8, 8, 8, 8], rtol=1e-12)


@pytest.mark.parametrize(
    ("changes", "want"),
    [({}, 1.36888795), ({"attention_factor": 1.0}, 1.0), ({"attention_factor": 1.2}, 1.2)],
)
def test_yarn_multiplies_cosines_and_sines_as_published_or_as_told(
    changes: dict[str, float], want: float
) -> None:
    """Case C106: 0.1·ln(40) + 1, or exactly what is given."""
    rope = RopeConfig("yarn", factor=40.0, original_max_position=32, **changes)
    assert rope.attention_scaling == (want if changes else pytest.approx(want, rel=1e-8))
    cos, sin = rotation(rope, 16, jnp.arange(40)[None], jnp.float32)
    assert cos[0, 0, 0] == np.float32(rope.attention_scaling)
    np.testing.assert_allclose(np.hypot(cos, sin), want, rtol=1e-6)


@pytest.mark.parametrize(
    ("rope", "want"),
    [
        (RopeConfig("yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0), 1.0),
        (
            RopeConfig("yarn", factor=40.0, mscale=0.707, mscale_all_dim=1.0),
            (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1),
        ),
        (RopeConfig("yarn", factor=40.0, mscale=0.707), 0.1 * math.log(40) + 1),
        (RopeConfig("yarn", factor=0.5), 1.0),
        (LONGROPE, math.sqrt(1 + math.log(4) / math.log(64))),
        (RopeConfig("longrope", factor=1.0, original_max_position=64), 1.0),
        (RopeConfig("longrope", factor=4.0, attention_factor=1.25), 1.25),
        (RopeConfig("linear", factor=4.0, attention_factor=1.25), 1.0),
    ],
)
def test_attention_scaling_of_each_kind(rope: RopeConfig, want: float) -> None:
    assert rope.attention_scaling == pytest.approx(want, rel=1e-14)


def frequencies_in(rope: RopeConfig, head_dim: int, length: int) -> np.ndarray:
    """float32 [R/2]: the angles at position 1 of a document of `length` tokens."""
    cos, sin = rotation(rope, head_dim, jnp.ones((1, 1), jnp.int32), jnp.float32, jnp.full((1, 1), length))
    return np.arctan2(sin, cos)[0, 0]


# float32: an ulp or two each in the power, the cosine and sine, and the arctangent
FLOAT32 = 1e-6


@pytest.mark.parametrize("length", [1, 63, 64, 65, 100, 256, 4096])
def test_dynamic_grows_theta_with_the_documents_length(length: int) -> None:
    beyond = max(length, 64)
    theta = 1e4 * (4 * beyond / 64 - (4 - 1)) ** (8 / (8 - 2))
    np.testing.assert_allclose(
        frequencies_in(DYNAMIC, 8, length), [theta ** (-i / 8) for i in (0, 2, 4, 6)], rtol=FLOAT32
    )


@pytest.mark.parametrize("length", [1, 63, 64, 65, 4096])
def test_longrope_divides_by_the_short_factors_up_to_the_original_length_and_by_the_long_ones_beyond(
    length: int,
) -> None:
    factors = LONG if length > 64 else SHORT
    np.testing.assert_allclose(
        frequencies_in(LONGROPE, 8, length),
        [1 / (factor * 1e4 ** (i / 8)) for factor, i in zip(factors, (0, 2, 4, 6), strict=True)],
        rtol=FLOAT32,
    )


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=lambda rope: rope.kind)
def test_a_documents_rotation_does_not_depend_on_its_neighbours_or_on_padding(rope: RopeConfig) -> None:
    """Rows and documents of 40 and 100 tokens: alone, side by side, packed, padded left and right."""

    def turn(positions: list[list[int]], segments: list[list[int]]) -> np.ndarray:
        at, of = jnp.asarray(positions, jnp.int32), jnp.asarray(segments, jnp.int32)
        return np.stack(rotation(rope, 8, at, jnp.float32, document_lengths(at, of)))

    short, long, pad = list(range(40)), list(range(100)), [0] * 60
    alone_short, alone_long = turn([short], [[1] * 40])[:, 0], turn([long], [[1] * 100])[:, 0]
    assert np.abs(alone_long[:, :40] - alone_short).max() > 0.1
    rows = turn([short + pad, long], [[1] * 40 + pad, [1] * 100])
    packed = turn([short + long + pad], [[1] * 40 + [2] * 100 + pad])
    left = turn([pad + short, long], [pad + [1] * 40, [1] * 100])
    for got in (rows[:, 0, :40], packed[:, 0, :40], left[:, 0, 60:]):
        np.testing.assert_array_equal(got, alone_short)
    for got in (rows[:, 1], packed[:, 0, 40:140], left[:, 1]):
        np.testing.assert_array_equal(got, alone_long)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)  # fmt: skip
def test_a_rows_logits_do_not_depend_on_a_longer_row_beside_it(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    settings = {"max_position_embeddings": 32 if scaling["rope_type"] == "dynamic" else 128}
    folder = write_llama(tmp_path / "m", tokenizer=False, rope_scaling=scaling, **settings)
    model = shardwise.load(folder, mesh="1,1,1", devices=jax.devices()[:1])
    tokens = np.random.default_rng(0).integers(0, 290, (2, 64))
    mask = np.ones((2, 64), int)
    mask[0, 20:] = 0  # 20 tokens are below the original length, 64 beyond it
    together = model.logits(tokens, mask)
    short, long = model.logits(tokens[:1, :20]), model.logits(tokens[1:])
    # other shapes, other order of float32 sums: values of order 1
    np.testing.assert_allclose(together[0, :20], short[0], atol=1e-5)
    np.testing.assert_allclose(together[1], long[0], atol=1e-5)
    beginning = model.logits(tokens[1:, :20])
    assert np.abs(beginning - long[:, :20]).max() > 1e-3, "the long row must be computed otherwise"


def test_document_lengths_are_those_that_a_loop_finds_whatever_the_order() -> None:
    rng = np.random.default_rng(0)
    positions, segments = rng.integers(0, 50, (4, 30)), rng.integers(0, 6, (4, 30)) * 1000
    want = [
        [1 + max(p for p, s in zip(*row, strict=True) if s == own) for own in row[1]]
        for row in zip(positions, segments, strict=True)
    ]
    got = document_lengths(jnp.asarray(positions, jnp.int32), jnp.asarray(segments, jnp.int32))
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, want)


def test_a_kind_that_depends_on_the_length_is_not_computed_without_it() -> None:
    with pytest.raises(ConfigError, match="rope type 'dynamic' depends on the length of the document"):
        rotation(DYNAMIC, 8, jnp.zeros((1, 1), jnp.int32), jnp.float32)


def test_only_the_first_features_turn_where_a_part_does_and_as_in_a_head_of_that_size() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3, 16)), jnp.float32)
    positions = jnp.asarray(np.random.default_rng(1).integers(0, 50, (2, 5)), jnp.int32)
    turned = rotate(x, rotation(RopeConfig(rotary_dim=4), 16, positions, jnp.float32))
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    whole = rotate(x[..., :4], rotation(RopeConfig(), 4, positions, jnp.float32))
    np.testing.assert_array_equal(turned[..., :4], whole)
    assert np.abs(turned[..., :4] - x[..., :4]).max() > 0.1


@pytest.mark.parametrize("rope", [RopeConfig(), DYNAMIC, LONGROPE], ids=lambda rope: rope.kind)
def test_angles_are_float64_where_the_compute_dtype_is(rope: RopeConfig) -> None:
    with jax.enable_x64(True):
        positions, lengths = jnp.full((1, 1), 10**6, jnp.int32), jnp.full((1, 1), 10**6 + 1, jnp.int32)
        cos, sin = rotation(rope, 8, positions, jnp.float64, lengths)
        assert cos.dtype == sin.dtype == jnp.float64
    theta = 1e4 if rope.kind != "dynamic" else 1e4 * (4 * (10**6 + 1) / 64 - 3) ** (8 / 6)
    divisors = LONG if rope.kind == "longrope" else (1.0,) * 4
    angles = 10**6 * np.array([theta ** (-i / 8) / f for i, f in zip((0, 2, 4, 6), divisors, strict=True)])
    # angles up to 1e6 are known to 1e6·2⁻⁵²; float32 ones would be off by 0.06
    np.testing.assert_allclose(cos[0, 0], np.cos(angles) * rope.attention_scaling, atol=1e-9)
    np.testing.assert_allclose(sin[0, 0], np.sin(angles) * rope.attention_scaling, atol=1e-9)


def test_angles_of_bfloat16_computation_are_float32() -> None:
    cos, _ = rotation(RopeConfig(), 8, jnp.full((1, 1), 1001, jnp.int32), jnp.bfloat16)
    assert cos.dtype == jnp.bfloat16
    assert float(cos[0, 0, 0]) == pytest.approx(math.cos(1001), abs=2**-8)
