"""Rotary position embedding: inverse frequencies for each kind of scaling, and the rotation.

The halves convention of Hugging Face: feature i turns with feature i + E/2. Not here: learned positions and
ALiBi.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position for each pair of features.

    Returns:
        float64 [E/2].

    Source: Su et al. 2021 eq. 15; `linear`: Chen et al. 2023; `llama3`: the smooth interpolation published
    with Llama 3.1: wavelengths longer than original_max_position / low_freq_factor are stretched by `factor`,
    those shorter than original_max_position / high_freq_factor are kept, those between are blended linearly
    in frequency.
    """
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = (
            rope.original_max_position * frequencies / (2 * math.pi)
        )  # full turns within the original context
        span = rope.high_freq_factor - rope.low_freq_factor
        keep = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
        return frequencies * (keep + (1.0 - keep) / rope.factor)
    return frequencies


def rotation(
    rope: RopeConfig, head_dim: int, positions: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of every position.

    Args:
        positions: int32 [B, T].
        dtype: of the result; angles are computed in float32 at least.

    Returns:
        cos, sin: [B, T, E/2].
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    angles = positions.astype(wide)[..., None] * jnp.asarray(inverse_frequencies(rope, head_dim), wide)
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate(x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn the features of every head by its position.

    Args:
        x: [B, T, heads…, E].
        cos_sin: [B, T, E/2] each.
    """
    heads = x.ndim - 3
    cos, sin = (jnp.expand_dims(part, range(2, 2 + heads)) for part in cos_sin)
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
