"""Rotary position embedding: frequencies of each kind of scaling, and the rotation.

The halves convention of Hugging Face: of the R features that turn, feature i turns with feature i + R/2. Not
here: learned positions and ALiBi.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.errors import ConfigError
from shardwise.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position for each pair of features; for kinds that depend on the length, those of a
    document of at most `original_max_position` tokens.

    Returns:
        float64 [R/2].

    Raises:
        ConfigError: the settings do not fit a head of `head_dim` features.

    Source: Su et al. 2021 eq. 15; RopeConfig.kind names that of each scaling.
    """
    width = rope.features(head_dim)
    frequencies = rope.theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position * frequencies / (2 * math.pi)  # within the original context
        span = rope.high_freq_factor - rope.low_freq_factor
        keep = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
        return frequencies * (keep + (1.0 - keep) / rope.factor)
    if rope.kind == "yarn":
        keep = _yarn_keep(rope, width)
        return frequencies * (keep + (1.0 - keep) / rope.factor)
    if rope.kind == "longrope":
        return frequencies / np.asarray(rope.short_factor, np.float64)
    return frequencies


def _yarn_keep(rope: RopeConfig, width: int) -> np.ndarray:
    """How much of each frequency stays as it is, 0 to 1: float64 [R/2] (Peng et al. 2023, "NTK-by-parts").

    The published ramp runs over the number of turns within the original context; the published code, and
    every checkpoint with it, over the index of the pair, between the (fractional) indices that turn beta_fast
    and beta_slow times.
    """

    def index(turns: float) -> float:
        """The pair, counted from 0, that turns so many times within the original context."""
        return (
            width * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    first, last = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001  # as the published code avoids dividing by 0
    return 1.0 - np.clip((np.arange(width // 2) - first) / (last - first), 0.0, 1.0)


def document_lengths(positions: jax.Array, segments: jax.Array) -> jax.Array:
    """For every token the length of its document: the greatest position in it, plus 1.

    It depends on the document's own tokens alone: not on padding, nor on other rows or documents.

    Args:
        positions: int32 [B, T], counted within each document.
        segments: int32 [B, T]: which tokens of a row belong together; they need not be neighbours.

    Returns:
        int32 [B, T].
    """
    by_segment, by_position = jax.lax.sort((segments, positions), dimension=1, num_keys=2)
    behind = jax.vmap(lambda row, wanted: jnp.searchsorted(row, wanted, side="right"))(by_segment, segments)
    return jnp.take_along_axis(by_position, behind - 1, axis=1) + 1


def rotation(
    rope: RopeConfig,
    head_dim: int,
    positions: jax.Array,
    dtype: jnp.dtype,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of every position, times `rope.attention_scaling`.

    Args:
        positions: int32 [B, T].
        dtype: of the result; angles are computed in float32 at least.
        lengths: int32 [B, T] or [B, 1]: for each token the length of its document (`document_lengths`, or
            what is known of it so far); needed, and used, only where `rope.depends_on_length`.

    Returns:
        cos, sin: [B, T, R/2].

    Raises:
        ConfigError: `lengths` is missing; the settings do not fit a head of `head_dim` features.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    angles = positions.astype(wide)[..., None] * _frequencies(rope, head_dim, lengths, wide)
    cos, sin, factor = jnp.cos(angles), jnp.sin(angles), rope.attention_scaling
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    return cos.astype(dtype), sin.astype(dtype)


def _frequencies(rope: RopeConfig, head_dim: int, lengths: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Radians per position: [R/2], or [B, T, R/2] where they depend on the document's length."""
    within = inverse_frequencies(rope, head_dim)
    if not rope.depends_on_length:
        return jnp.asarray(within, dtype)
    if lengths is None:
        raise ConfigError(
            f"rope type {rope.kind!r} depends on the length of the document, which is not known here"
            " (rotation was given no lengths); compute whole sequences instead"
        )
    original, lengths = rope.original_max_position, lengths[..., None]
    if rope.kind == "longrope":
        beyond = within * np.asarray(rope.short_factor) / np.asarray(rope.long_factor)
        return jnp.where(lengths > original, jnp.asarray(beyond, dtype), jnp.asarray(within, dtype))
    # theta grows by s^(R / (R - 2)), s = 1 + factor · (length / original - 1), so that the longest wavelength
    # is stretched by just s and the shortest stays; the power of theta is taken apart to keep its precision.
    growth = 1 + rope.factor * (jnp.maximum(lengths - original, 0).astype(dtype) / original)
    width = rope.features(head_dim)
    return jnp.asarray(within, dtype) * growth ** jnp.asarray(-np.arange(0, width, 2) / (width - 2), dtype)


def rotate(x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn the first R features of every head by its position; the others stay.

    Args:
        x: [B, T, heads…, E].
        cos_sin: [B, T, R/2] each.
    """
    heads = x.ndim - 3
    cos, sin = (jnp.expand_dims(part, range(2, 2 + heads)) for part in cos_sin)
    half = cos.shape[-1]
    low, high, rest = jnp.split(x, (half, 2 * half), axis=-1)
    turned = [low * cos - high * sin, high * cos + low * sin]
    return jnp.concatenate(turned if not rest.shape[-1] else [*turned, rest], axis=-1)
