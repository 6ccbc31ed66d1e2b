"""Attention: one function that picks the kernel for the platform, with softmax in float32.

Keys may be attended to by queries of the same segment at the same or a later position. That one rule covers
causal batches, padding, packed documents and a cache. Not here: projections (transformer.py) and the cache
(cache.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from shardwise.partition.constraints import Placement
from shardwise.partition.plan import partition_spec

Kernel = Literal["auto", "xla", "tokamax"]
QUERY_BLOCK = 512
"""Queries per block on the XLA path: bounds the scores held at once to B·H·512·S."""


@dataclass(frozen=True)
class Visibility:
    """Which keys each query sees: those of its segment that are not ahead of it."""

    q_positions: jax.Array
    """int32 [B, T]."""
    q_segments: jax.Array
    """int32 [B, T]; 0 marks padding."""
    k_positions: jax.Array
    """int32 [B, S]."""
    k_segments: jax.Array
    """int32 [B, S]."""

    def mask(self) -> jax.Array:
        """bool [B, T, S]."""
        same = self.q_segments[:, :, None] == self.k_segments[:, None, :]
        return same & (self.k_positions[:, None, :] <= self.q_positions[:, :, None])


jax.tree_util.register_dataclass(Visibility)


def attention(
    place: Placement, q: jax.Array, k: jax.Array, v: jax.Array, visible: Visibility, kernel: Kernel = "auto"
) -> jax.Array:
    """Scaled dot-product attention with grouped query heads.

    Args:
        q: [B, T, K, G, E]: G query heads share each of K key/value heads.
        k, v: [B, S, K, E].
        visible: positions and segments of queries and keys.
        kernel: `auto` takes tokamax's fused kernel on GPU and TPU where there is more than one query a row,
            and XLA elsewhere.

    Returns:
        [B, T, K, G, E] in q's dtype. Scores are scaled by 1/√E (Vaswani et al. 2017, eq. 1).
    """
    if kernel == "auto":
        fused = place.mesh.devices.flat[0].platform in ("gpu", "tpu") and q.shape[1] > 1
        kernel = "tokamax" if fused else "xla"
    return _tokamax(place, q, k, v, visible) if kernel == "tokamax" else _xla(q, k, v, visible)


def _xla(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visibility) -> jax.Array:
    length = q.shape[1]
    if length <= QUERY_BLOCK or length % QUERY_BLOCK:
        return _block(q, k, v, visible)
    outs = []
    for start in range(0, length, QUERY_BLOCK):
        rows = slice(start, start + QUERY_BLOCK)
        part = Visibility(
            visible.q_positions[:, rows], visible.q_segments[:, rows], visible.k_positions, visible.k_segments
        )
        outs.append(jax.checkpoint(_block)(q[:, rows], k, v, part))
    return jnp.concatenate(outs, axis=1)


def _block(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visibility) -> jax.Array:
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("btkge,bske->bkgts", q * q.shape[-1] ** -0.5, k, preferred_element_type=wide)
    scores = jnp.where(visible.mask()[:, None, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("bkgts,bske->btkge", weights, v)


def _tokamax(place: Placement, q: jax.Array, k: jax.Array, v: jax.Array, visible: Visibility) -> jax.Array:
    """tokamax's kernel on each device's own rows and heads: the partitioner cannot cut a Pallas kernel."""
    import tokamax

    rules = place.plan.rules
    batch, heads = rules.mesh_axes("batch"), rules.mesh_axes("heads")

    @partial(
        jax.shard_map,
        mesh=place.mesh,
        in_specs=(
            partition_spec((batch, (), heads, (), ())),
            partition_spec((batch, (), heads, ())),
            partition_spec((batch, (), heads, ())),
            partition_spec((batch, ())),
        ),
        out_specs=partition_spec((batch, (), heads, (), ())),
        check_vma=False,  # a Pallas call does not say how its result varies over the mesh
    )
    def local(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visibility) -> jax.Array:
        merged = q.reshape(*q.shape[:2], -1, q.shape[-1])
        out = tokamax.dot_product_attention(merged, k, v, mask=visible.mask()[:, None])
        return out.reshape(q.shape)

    return local(q, k, v, visible)
