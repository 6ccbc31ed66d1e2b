"""Rotary embedding: frequencies of each scaling against the published formulas; what defines the rotation."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from shardwise.models.config import RopeConfig
from shardwise.models.positions import inverse_frequencies, rotate, rotation


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
